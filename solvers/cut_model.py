"""The time-cut MILP: a relaxation of rematerialization that looks at memory at a few moments only.

Choose ops t₁ < … < t_k (the *cuts*).  S[i,u]: storage u is retained past the first run of tᵢ.
R[i,v]: op v is recomputed in stage i, which lasts from the first run of tᵢ to that of tᵢ₊₁.  What
the first runs of a stage read, and what its recomputations read, is retained or recomputed; what is
retained past a cut was retained past the one before, or recomputed, or made in between; and the
storages retained past tᵢ fit in the budget together with what tᵢ reads and makes.

Every legal schedule within the budget gives such S and R at no more than its own cost, so the
optimum, and every bound on it, is a lower bound for all of them: memory between the cuts, the order
within a stage and recomputations before t₁ are left out, and so is whatever an op might not take
over in place.  Where the output of tᵢ may take over an input's buffer, that counts as done unless
all such inputs are retained past tᵢ.  With several cuts, Y[i,v] ≤ Σ_{j≥i} R[j,v] says that v is
recomputed after tᵢ at all, and each cut's own closure over Y tightens the linear relaxation.
On request memory is also looked at inside a stage, at the recomputation of an op.

Ops of one symmetry class (`solvers.symmetry`: the same place in repeated layers) share a variable
that counts how many of them are retained or recomputed, and a row that is the sum of theirs.  The
model is then as large as if each layer between two cuts were there once, and still a relaxation.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ortools.math_opt.python import mathopt

from planner.solvers.milp import optimise
from planner.solvers.problem import Problem
from planner.solvers.repetition import Run
from planner.solvers.symmetry import SymmetryClasses, symmetry_classes
from planner.solvers.working_set import fixed_bytes, inplace_candidates


@dataclass(frozen=True, slots=True)
class CutSolution:
    """What the MILP says."""

    retained: tuple[frozenset[int], ...] | None
    """Storages to retain past each cut; `None` where no solution was found."""
    extra_cost: float
    """Cost of the recomputations in the model's solution (infinite where there is none)."""
    extra_bound: float
    """No legal schedule within the budget (and the model's restrictions) recomputes for less;
    infinite where none exists."""
    solved: bool
    """The model was solved to the end, or proven infeasible."""
    work: float
    """See `solvers.milp.MilpResult`."""


@dataclass(frozen=True, slots=True)
class CutModel:
    """The MILP of one problem, its budget and its cuts."""

    problem: Problem
    budget_bytes: int
    cuts: tuple[int, ...]
    """Ops at whose first runs memory is looked at, ascending."""
    anchors: frozenset[int] = frozenset()
    """Storages that are retained past every cut after their first run.  A restriction: with
    anchors, `extra_bound` says nothing about other schedules."""
    headroom_bytes: tuple[int, ...] = ()
    """For each cut the bytes that may be used there; the budget where empty.  Less than the budget
    is a restriction as well."""
    inner: tuple[tuple[int, int], ...] = ()
    """(cut, op): memory is also looked at while the op is recomputed in the stage that this cut
    ends, if it is recomputed there.  Not with the first cut."""
    price: float = 0.0
    """What each byte retained past the first cut costs, besides; cost and bound contain it."""
    runs: tuple[Run, ...] = ()
    """Where ops repeat; what is alike there is counted instead of told apart."""
    retention_costs: Mapping[int, float] = field(default_factory=dict)
    """What it costs to retain a storage past the first cut, besides; cost and bound contain it."""

    def solve(self, seconds: float, *, seed: int = 0, gap: float = 0.0, nodes: int | None = None,
              work: float = math.inf) -> CutSolution:
        """Solve within a time limit, a number of nodes and some work (`milp.optimise`), to within a
        gap in units of cost.

        There is no way to hand it a schedule to start from: that made it slower.
        """
        return _Program(self).solve(seconds, seed, gap, nodes, work)


class _Program:
    """A `CutModel` written down in MathOpt."""

    def __init__(self, model: CutModel) -> None:
        self.problem, self.spec = model.problem, model
        problem = model.problem
        self.mip = mathopt.Model()
        self.cuts = model.cuts
        count = len(self.cuts)
        self.live = _live_past_cuts(problem, self.cuts)
        self.classes = _symmetry_classes(model, self.live)
        # Variables by stage and class; each counts members.
        self.retained: list[dict[int, mathopt.Variable]] = [{} for _ in self.cuts]
        self.again: list[dict[int, mathopt.Variable]] = [{} for _ in self.cuts]
        costs = [op.cost for op in problem.ops if op.cost > 0]
        self.cost_unit = max(costs, default=1.0) / 1000.0
        for stage in range(count):
            for storage in self.live[stage].storages:
                if self.classes.of_storage[storage] == storage:
                    self.retained[stage][storage] = self.mip.add_integer_variable(
                        lb=0, ub=len(self.classes.storages[storage]))
            for op in self.live[stage].ops:
                if self.classes.of_op[op] == op:
                    self.again[stage][op] = self.mip.add_integer_variable(
                        lb=0, ub=len(self.classes.members[op]))
        for stage in range(count):
            self._stage(stage)
            self._memory(stage)
        for cut, op in model.inner:
            self._inner_memory(self.cuts.index(cut) - 1, op)
        if count > 1:
            for stage in range(count - 1):
                self._closure(stage)
        objective = mathopt.LinearSum(
            problem.ops[op].cost / self.cost_unit * variable
            for stage in self.again for op, variable in stage.items())
        if model.price:
            objective += mathopt.LinearSum(
                model.price * problem.storages[storage].size_bytes / self.cost_unit * variable
                for storage, variable in self.retained[0].items())
        for storage, variable in self.retained[0].items():
            # Of members that differ, the least: a bound for each is one for all.
            cost = min(model.retention_costs.get(member, 0.0)
                       for member in self.classes.storages[storage])
            if cost:
                objective += cost / self.cost_unit * variable
        self.mip.minimize(objective)

    def _row(self, terms: Mapping[mathopt.Variable, float], lower: float) -> None:
        """Require the sum of coefficient times variable to be at least `lower`."""
        row = self.mip.add_linear_constraint(lb=lower)
        for variable, coefficient in terms.items():
            row.set_coefficient(variable, coefficient)

    def _at_hand(self, stage: int, leader: int,
                 again: Mapping[int, mathopt.Variable]) -> dict[mathopt.Variable, float]:
        """How many storages of a class (`leader` is its first) are retained into a stage, or made
        by what `again` counts."""
        terms = {}
        if leader in self.retained[stage]:
            terms[self.retained[stage][leader]] = 1.0
        producer = self.classes.of_op[self.problem.storages[leader].producer]
        if producer in again:
            terms[again[producer]] = 1.0
        return terms

    def _needs(self, stage: int, leader: int, again: Mapping[int, mathopt.Variable]) -> None:
        """What the ops of a class read is at hand where they are recomputed: for each input, the
        sum of that over the members."""
        ops, members = self.problem.ops, self.classes.members[leader]
        for place in range(len(ops[leader].inputs)):
            read = Counter(storage for op in members
                           if not self.problem.storages[storage := ops[op].inputs[place]
                                                        ].kept_to_end)
            if not read:
                continue
            most: dict[int, int] = {}
            for storage, times in read.items():
                source = self.classes.of_storage[storage]
                most[source] = max(times, most.get(source, 0))
            terms: defaultdict[mathopt.Variable, float] = defaultdict(float)
            for source, times in most.items():
                for variable in self._at_hand(stage, source, again):
                    terms[variable] += times
            terms[again[leader]] -= 1.0
            self._row(terms, float(read.total() - len(members)))

    def _stage(self, stage: int) -> None:
        live, classes = self.live[stage], self.classes
        for storage in live.demanded:
            if classes.of_storage[storage] == storage:
                self._row(self._at_hand(stage, storage, self.again[stage]),
                          float(len(classes.storages[storage])))
        for op in self.again[stage]:
            self._needs(stage, op, self.again[stage])
        if stage + 1 < len(self.cuts):
            for storage, variable in self.retained[stage + 1].items():
                if self.problem.storages[storage].producer <= self.cuts[stage]:
                    self._row({**self._at_hand(stage, storage, self.again[stage]),
                               variable: -1.0}, 0.0)
        for storage in self.spec.anchors:
            if storage in self.retained[stage]:
                variable = self.retained[stage][storage]
                variable.lower_bound = variable.upper_bound

    def _memory(self, stage: int) -> None:
        problem, cut = self.problem, self.cuts[stage]
        op = problem.ops[cut]
        headroom = (
            self.spec.headroom_bytes[stage] if self.spec.headroom_bytes else self.spec.budget_bytes
        )
        headroom -= fixed_bytes(problem, cut)
        held = {*op.inputs, *op.outputs}
        terms: dict[mathopt.Variable, float] = {}
        for storage, variable in self.retained[stage].items():
            if storage not in held:
                terms[variable] = -float(problem.storages[storage].size_bytes)
        for replayed in sorted({v for later in self.again[stage:] for v in later if v <= cut}):
            state = problem.ops[replayed].replay_state_bytes
            if state:
                once = self.mip.add_variable(lb=0.0, ub=len(self.classes.members[replayed]))
                for later in self.again[stage:]:
                    if replayed in later:
                        self._row({once: 1.0, later[replayed]: -1.0}, 0.0)
                terms[once] = -float(state)
        candidates = inplace_candidates(problem, cut)
        if candidates:
            size = problem.storages[candidates[0]].size_bytes
            taken = self.mip.add_variable(lb=0.0, ub=1.0)
            row = {taken: -1.0}
            for storage in candidates:
                if storage in self.retained[stage]:
                    row[self.retained[stage][storage]] = -1.0
            self._row(row, -float(len(candidates)))
            terms[taken] = float(size)
        unit = max(1.0, self.spec.budget_bytes / 1e4)
        self._row({v: c / unit for v, c in terms.items() if c}, -headroom / unit)

    def _inner_memory(self, stage: int, op: int) -> None:
        """Where `op` is recomputed in a stage, there is room for what it reads, makes and takes for
        itself beside what stays throughout the stage: what is retained past its end, or read by
        the cut that ends it, and not recomputed in it."""
        problem, described, cut = self.problem, self.problem.ops[op], self.cuts[stage + 1]
        if op not in self.again[stage]:
            return
        own = {*described.inputs, *described.outputs}
        read = set(problem.ops[cut].inputs)
        unit = max(1.0, self.spec.budget_bytes / 1e4)
        taken = max((problem.storages[s].size_bytes for s in described.inplace), default=0)
        size = sum(problem.storages[s].size_bytes for s in own) + described.workspace_bytes - taken
        terms = {self.again[stage][op]: -size / unit}
        headroom = self.spec.budget_bytes / unit
        for storage, members in self.classes.storages.items():
            listed = problem.storages[storage]
            if storage in own or listed.producer > self.cuts[stage]:
                continue
            share, count = listed.size_bytes / unit, float(len(members))
            after = self.retained[stage + 1].get(storage)
            if listed.kept_to_end:
                headroom -= share * count
            elif share and (storage in read or after is not None):
                stays = self.mip.add_variable(lb=0.0, ub=count)
                row = {stays: 1.0}
                producer = self.classes.of_op[listed.producer]
                if producer in self.again[stage]:
                    row[self.again[stage][producer]] = 1.0
                if storage in read:
                    self._row(row, count)
                else:
                    self._row({**row, after: -1.0}, 0.0)
                terms[stays] = -share
        self._row(terms, -headroom)

    def _closure(self, stage: int) -> None:
        """The single-cut closure after a cut, over whether an op is recomputed at all."""
        problem, cut, classes = self.problem, self.cuts[stage], self.classes
        total: dict[int, mathopt.Variable] = {}
        for op in sorted({v for later in self.again[stage:] for v in later if v <= cut}):
            total[op] = self.mip.add_variable(lb=0.0, ub=len(classes.members[op]))
            self._row({**{later[op]: 1.0 for later in self.again[stage:] if op in later},
                       total[op]: -1.0}, 0.0)
        wanted = {s for later in range(stage, len(self.cuts)) for s in self.live[later].demanded
                  if problem.storages[s].producer <= cut and classes.of_storage[s] == s}
        for storage in sorted(wanted):
            self._row(self._at_hand(stage, storage, total), float(len(classes.storages[storage])))
        for op in total:
            self._needs(stage, op, total)

    def solve(self, seconds: float, seed: int, gap: float, nodes: int | None, work: float
              ) -> CutSolution:
        answer = optimise(self.mip, seconds, seed=seed, gap=gap / self.cost_unit, nodes=nodes,
                          work=work)
        retained = None
        if answer.values is not None:
            retained = tuple(self._told_apart(stage, answer.values)
                             for stage in range(len(self.cuts)))
        return CutSolution(retained, answer.objective * self.cost_unit,
                           answer.bound * self.cost_unit, answer.solved, answer.work)

    def _told_apart(self, stage: int,
                    values: Mapping[mathopt.Variable, float]) -> frozenset[int]:
        """Which storages are retained past a cut, where the values count those of each class: the
        first members are those that are recomputed, the next ones are retained.  The first are made
        by the earliest layers, which are wanted last."""
        chosen: list[int] = []
        for leader, variable in self.retained[stage].items():
            members = self.classes.storages[leader]
            producer = self.classes.of_op[self.problem.storages[leader].producer]
            again = self.again[stage].get(producer)
            retained = round(values[variable])
            skipped = 0 if again is None else round(values[again])
            first = min(skipped, len(members) - retained)
            chosen += members[first:first + retained]
        return frozenset(chosen)


@dataclass(frozen=True, slots=True)
class _Live:
    """What matters in one stage."""

    demanded: tuple[int, ...]
    """Storages made up to the cut that the stage's first runs read."""
    storages: tuple[int, ...]
    """Storages that it may make sense to retain past the cut."""
    ops: tuple[int, ...]
    """Ops that it may make sense to recompute in the stage."""


def _symmetry_classes(model: CutModel, live: Sequence[_Live]) -> SymmetryClasses:
    """The classes that the rows of a model allow: what the op at a cut, or one that memory is
    looked at for, reads and makes is told apart."""
    problem = model.problem
    near = {*model.cuts, *(op for _, op in model.inner)}
    alone = near | {problem.storages[s].producer for op in near for s in problem.ops[op].inputs}
    seen = [model.anchors, *(stage.storages for stage in live), *(stage.demanded for stage in live)]
    return symmetry_classes(problem, model.runs, model.cuts, seen, [stage.ops for stage in live],
                            alone)


def _live_past_cuts(problem: Problem, cuts: Sequence[int]) -> list[_Live]:
    """Per stage what first runs demand, and all that may serve them directly or through
    recomputation; storages kept to the end are always at hand and left out."""
    ops, storages = problem.ops, problem.storages
    ends = [*cuts[1:], len(ops)]
    carried: set[int] = set()
    lives: list[_Live] = []
    for cut, end in zip(reversed(cuts), reversed(ends), strict=True):
        demanded = {s for op in ops[cut + 1:end + 1] for s in op.inputs
                    if storages[s].producer <= cut and not storages[s].kept_to_end}
        last = min(end, len(ops) - 1)
        allowed = {home for segment in problem.segments[
            problem.segment_of[min(cut + 1, len(ops) - 1)]:problem.segment_of[last] + 1]
            for home in segment.replays}
        wanted = demanded | {s for s in carried if storages[s].producer <= cut}
        again: set[int] = set()
        stack = list(wanted)
        while stack:
            producer = storages[stack.pop()].producer
            if (producer in again or not ops[producer].recomputable
                    or problem.segment_of[producer] not in allowed):
                continue
            again.add(producer)
            for source in ops[producer].inputs:
                if source not in wanted and not storages[source].kept_to_end:
                    wanted.add(source)
                    stack.append(source)
        carried = wanted
        lives.append(_Live(tuple(sorted(demanded)), tuple(sorted(wanted)), tuple(sorted(again))))
    return lives[::-1]
