"""The time-cut MILP: a relaxation of rematerialization that constrains memory at a few moments
only.

Choose ops t₁ < … < t_k (the *cuts*).  S[i,u]: storage u is retained past the first run of tᵢ.
R[i,v]: op v is recomputed in stage i, which lasts from the first run of tᵢ to that of tᵢ₊₁. Inputs
of the first runs of a stage, and of its recomputations, are retained or recomputed.  A storage
retained past a cut was retained past the one before, or recomputed, or made in between.  The
storages retained past tᵢ fit in the budget together with the inputs and outputs of tᵢ. Every legal
schedule within the budget gives such S and R at no more than its own cost, so the optimum, and
every bound on it, is a lower bound for all of them.  Left out are memory between the cuts, the
order within a stage, recomputations before t₁, and inputs that an op might take over in place.  If
the output of tᵢ may take over an input's buffer, that counts as done unless all such inputs are
retained past tᵢ. With several cuts, Y[i,v] ≤ Σ_{j≥i} R[j,v] says that v is recomputed after tᵢ at
all, and each cut's own closure over Y tightens the linear relaxation.

Ops of one symmetry class (the same place in repeated layers) share a variable
that counts how many of them are retained or recomputed, and a row that is the sum of theirs.  The
model is then as small as if each layer between two cuts occurred once, and still a relaxation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ortools.math_opt.python import mathopt

from planner.solvers.frontiers import reads_across, recomputations
from planner.solvers.milp import optimise
from planner.solvers.problem import Problem
from planner.solvers.repetition import Run


@dataclass(frozen=True, slots=True)
class CutSolution:
    """The result of the MILP."""

    retained: tuple[frozenset[int], ...] | None
    """Storages to retain past each cut; `None` if no solution was found."""
    extra_bound: float
    """Lower bound on the recomputation cost of every legal schedule within the budget; infinite if
    none exists."""
    solved: bool
    """True if the model was solved to the end, or proven infeasible."""
    work: float
    """See `solvers.milp.MilpResult`."""


class CutModel:
    """The MILP of one problem, its budget and its cuts."""

    def __init__(self, problem: Problem, budget_bytes: int, cuts: tuple[int, ...], *,
                 runs: tuple[Run, ...] = (),
                 retention_costs: Mapping[int, float] = MappingProxyType({})) -> None:
        """`cuts`: ops at whose first runs memory is constrained, ascending.  `runs`: repeated ops;
        equal ones are counted instead of distinguished.  `retention_costs`: additional cost of
        retaining a storage past the first cut; included in cost and bound."""
        self.problem, self.budget_bytes, self.cuts = problem, budget_bytes, cuts
        self.mip = mathopt.Model()
        count = len(self.cuts)
        self.live = _live_past_cuts(problem, self.cuts)
        self.classes = _symmetry_classes(problem, runs, cuts, self.live)
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
        for stage in range(count - 1):
            self._closure(stage)
        objective = mathopt.LinearSum(
            problem.ops[op].cost / self.cost_unit * variable
            for stage in self.again for op, variable in stage.items())
        for storage, variable in self.retained[0].items():
            # The least cost among members that differ: a bound for each is one for all.
            cost = min(retention_costs.get(member, 0.0)
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
        """Number of storages of a class (`leader` is its first) that are retained into a stage, or
        made by the ops that `again` counts."""
        terms = {}
        if leader in self.retained[stage]:
            terms[self.retained[stage][leader]] = 1.0
        producer = self.classes.of_op[self.problem.storages[leader].producer]
        if producer in again:
            terms[again[producer]] = 1.0
        return terms

    def _needs(self, stage: int, leader: int, again: Mapping[int, mathopt.Variable]) -> None:
        """Require the inputs of a class of ops where they are recomputed: for each input, the sum
        over the members."""
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

    def _memory(self, stage: int) -> None:
        problem, cut = self.problem, self.cuts[stage]
        op = problem.ops[cut]
        headroom = self.budget_bytes - problem.fixed_bytes(cut)
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
        candidates = problem.inplace_candidates(cut)
        if candidates:
            size = problem.storages[candidates[0]].size_bytes
            taken = self.mip.add_variable(lb=0.0, ub=1.0)
            row = {taken: -1.0}
            for storage in candidates:
                if storage in self.retained[stage]:
                    row[self.retained[stage][storage]] = -1.0
            self._row(row, -float(len(candidates)))
            terms[taken] = float(size)
        unit = max(1.0, self.budget_bytes / 1e4)
        self._row({v: c / unit for v, c in terms.items() if c}, -headroom / unit)

    def _closure(self, stage: int) -> None:
        """Add the single-cut closure after a cut, over whether an op is recomputed at all."""
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

    def solve(self, seconds: float, *, seed: int = 0, gap: float = 0.0, nodes: int | None = None,
              work: float = math.inf) -> CutSolution:
        """Solve within a time limit, a number of nodes and some work (`milp.optimise`), to within a
        gap in units of cost.

        No initial schedule can be given: that made it slower.
        """
        answer = optimise(self.mip, seconds, seed=seed, gap=gap / self.cost_unit, nodes=nodes,
                          work=work)
        retained = None
        if answer.values is not None:
            retained = tuple(self._told_apart(stage, answer.values)
                             for stage in range(len(self.cuts)))
        return CutSolution(retained, answer.bound * self.cost_unit, answer.solved, answer.work)

    def _told_apart(self, stage: int,
                    values: Mapping[mathopt.Variable, float]) -> frozenset[int]:
        """Return the storages retained past a cut, from values that count those of each class.  The
        first members are recomputed, the next ones retained: the earliest layers make the first
        ones, which are needed last."""
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
    """Storages and ops that matter in one stage."""

    demanded: tuple[int, ...]
    """Storages made up to the cut that the stage's first runs read."""
    storages: tuple[int, ...]
    """Storages that may be worth retaining past the cut."""
    ops: tuple[int, ...]
    """Ops that may be worth recomputing in the stage."""


def _live_past_cuts(problem: Problem, cuts: Sequence[int]) -> list[_Live]:
    """Return, per stage, the storages that first runs demand, and all that may serve them directly
    or through recomputation."""
    carried: set[int] = set()
    lives: list[_Live] = []
    for cut, end in zip(reversed(cuts), reversed([*cuts[1:], len(problem)]), strict=True):
        demanded = reads_across(problem, cut, end)
        wanted = demanded | {s for s in carried if problem.storages[s].producer <= cut}
        again, carried, _ = recomputations(problem, wanted, cut, end)
        lives.append(_Live(tuple(sorted(demanded)), tuple(sorted(carried)), tuple(sorted(again))))
    return lives[::-1]


@dataclass(frozen=True, slots=True)
class SymmetryClasses:
    """A partition of the ops; storages follow the ops that make them.

    Ops at the same place of a run (`solvers.repetition`) are of one class if all cuts see them
    alike.  Adding up the rows of a class is a relaxation for any classes; their symmetry only keeps
    it sharp.  With one cut nothing is lost: rows that compare two variables split into whole
    solutions again, by giving the n-th of each class the value that the counts have for the n-th.
    """

    of_op: tuple[int, ...]
    """The first member of each op's class."""
    of_storage: tuple[int, ...]
    """The first member of each storage's class."""
    members: dict[int, tuple[int, ...]]
    """By first member, the ops of a class, ascending."""
    storages: dict[int, tuple[int, ...]]
    """By first member, the storages of a class, by producer."""


def _symmetry_classes(problem: Problem, runs: Sequence[Run], cuts: Sequence[int],
                      live: Sequence[_Live]) -> SymmetryClasses:
    """Return the coarsest classes that the rows of a model allow: their members are made between
    the same cuts, and they and their outputs are live in the same stages.  The inputs and outputs
    of an op at a cut are in classes of their own."""
    alone = {*cuts, *(problem.storages[s].producer for op in cuts for s in problem.ops[op].inputs)}
    places: dict[int, Hashable] = {}
    for number, run in enumerate(runs):
        for op in range(run.start, run.stop):
            if op not in alone:
                places[op] = (number, (op - run.start) % run.period, bisect_left(cuts, op))
    marks: defaultdict[int, list[int]] = defaultdict(list)
    op_marks: defaultdict[int, list[int]] = defaultdict(list)
    for number, stage in enumerate(live):
        for op in stage.ops:
            op_marks[op].append(number)
        for storage in stage.storages:
            marks[storage].append(number)
        for storage in stage.demanded:
            marks[storage].append(~number)
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, described in enumerate(problem.ops):
        if index in places:
            groups[places[index], tuple(op_marks[index]),
                   tuple(tuple(marks[s]) for s in described.outputs)].append(index)
        else:
            groups[index].append(index)
    of_op = [0] * len(problem)
    of_storage = [0] * len(problem.storages)
    storages_of: dict[int, tuple[int, ...]] = {}
    for group in groups.values():
        for candidate, first in enumerate(problem.ops[group[0]].outputs):
            storages_of[first] = tuple(problem.ops[op].outputs[candidate] for op in group)
            for storage in storages_of[first]:
                of_storage[storage] = first
        for op in group:
            of_op[op] = group[0]
    members = {group[0]: tuple(group) for group in groups.values()}
    return SymmetryClasses(tuple(of_op), tuple(of_storage), members, storages_of)
