"""Search one graph variant of a step for Inductor: solve, generate code, judge, correct.

Model of the world: the scheduling problem counts ops, and Inductor generates kernels from them.
The memory of a schedule therefore differs between the problem and the compiled step: its codegen
overhead, which is similar for similar schedules.  The solver's schedule for a budget is adapted to
kernels (a result that Inductor recomputes for free, or for less than the cost of saving it, is not
saved), and judged by the code that Inductor generates for it
(`graph_capture.inductor.compiled_step`).  Then the solver's budget is corrected by the codegen
overhead.  These tries use a step without most of its repeated layers; the code of the whole step
confirms the plan.

Inductor's code depends on the buffers saved for the backward alone; all else that the backward
needs runs again just before its first use.  Inductor computes a pointwise result in the kernel that
reads it.  Saving it costs a write and a read; recomputing it costs arithmetic, and memory traffic
only for inputs that are not read anyway.  On a CPU, writing and reading a dropout mask takes longer
than drawing it again.

Work is counted, not timed: the same step and budget give the same plan on a busy machine, unless
the time limit is reached; then the best plan so far is returned, with a note.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from planner._apply.rewrite_spec import RewriteSpec
from planner._graph_capture.inductor.compiled_step import CompiledStep
from planner._graph_capture.training_graph import Phase, SavingCosts, TrainingGraph
from planner.plans.decisions import build_spec
from planner.search.variants import Effort, solve_variant
from planner.solvers.actions import as_order
from planner.solvers.cut_model import CutModel
from planner.solvers.errors import InfeasibleBudget as Refusal
from planner.solvers.problem import Schedule
from planner.solvers.repetition import runs_of
from planner.solvers.result import Result
from planner.solvers.schedule_from_cuts import next_cuts
from planner.solvers.simulator import unroll
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant
from planner.step.without_code import bound_without_code

_NODES = 50
"""Search nodes per model of the bound; if they do not suffice, the bound is lower."""
_WORK = 5.0
"""Work (see `solvers.milp.MilpResult`) after which no further model is solved."""
_GAP = 1e-4
"""Models of the bound are solved to within this fraction of the step's time."""


def schedule_saving(variant: Variant, saved: Set[int]) -> Schedule:
    """The schedule that keeps the buffers `saved` (and those that must not be recomputed) for the
    backward and recomputes the others just before their first use."""
    graph, problem = variant.graph, variant.problem
    schedule: list[int] = []
    available: set[int] = set(saved)

    def is_missing(buffer: int, before: int) -> bool:
        producer = graph.buffers[buffer].producer
        return (buffer not in available and problem.ops[producer].recomputable
                and not graph.buffers[buffer].kept_to_end
                and problem.may_replay(producer, before))

    def recompute(buffer: int, before: int) -> None:
        pending = [buffer]
        while pending:
            producer = graph.buffers[pending[-1]].producer
            if not is_missing(pending[-1], before):
                pending.pop()
                continue
            missing = [b for b in graph.ops[producer].inputs if is_missing(b, before)]
            if missing:
                pending.extend(missing)
                continue
            schedule.append(producer)
            available.update(graph.ops[producer].outputs)
            pending.pop()

    for index, op in enumerate(graph.ops):
        if op.phase is Phase.BACKWARD and op.digest:
            for buffer in op.inputs:
                producer = graph.buffers[buffer].producer
                if graph.ops[producer].phase is Phase.FORWARD and is_missing(buffer, index):
                    recompute(buffer, index)
        schedule.append(index)
    return tuple(schedule)


def saved_buffers(variant: Variant, schedule: Schedule) -> frozenset[int]:
    """Buffers of the forward whose first result the backward reads."""
    graph = variant.graph
    return frozenset(
        instance.storage for instance in variant.saved_instances(schedule)
        if graph.ops[graph.buffers[instance.storage].producer].phase is Phase.FORWARD)


def free_ops(variant: Variant, saved: Set[int]) -> frozenset[int]:
    """Ops that Inductor recomputes by itself, fused into the kernels that read them."""
    runs = Counter(as_order(schedule_saving(variant, saved)))
    return frozenset(index for index, count in runs.items() if count > 1)


def without_free(graph: TrainingGraph, saved: Set[int], free: Set[int]) -> frozenset[int]:
    """`saved` without the buffers that free ops compute from the other saved buffers."""
    known: dict[int, bool] = {}

    def available(buffer: int) -> bool:
        """True if the backward can compute the buffer from buffers that no free op produces."""
        if buffer not in known:
            producer = graph.buffers[buffer].producer
            if producer in free:
                known[buffer] = all(available(b) for b in graph.ops[producer].inputs)
            else:
                known[buffer] = buffer in saved or graph.buffers[buffer].kept_to_end
        return known[buffer]

    for op in graph.ops:  # in order, so that the recursion is shallow
        for buffer in op.outputs:
            available(buffer)
    return frozenset(buffer for buffer in saved
                     if graph.buffers[buffer].producer not in free or not available(buffer))


def saving_seconds(variant: Variant, schedule: Schedule, costs: SavingCosts) -> float:
    """Seconds to write and read the buffers that a schedule saves."""
    return sum(costs.to_save.get(buffer, 0.0) for buffer in saved_buffers(variant, schedule))


def without_cheap(variant: Variant, saved: Set[int], costs: SavingCosts) -> frozenset[int]:
    """`saved` without the buffers that are recomputed from the others in less time than it takes to
    write and read them; the largest gain is dropped first."""
    kept = set(saved)
    while True:
        recomputes = Recomputes(variant, kept, costs)
        gains = []
        for buffer in kept & costs.to_save.keys():
            seconds = recomputes.seconds(buffer, costs.to_save[buffer])
            if seconds < costs.to_save[buffer]:
                gains.append((seconds - costs.to_save[buffer], buffer))
        given_up: set[int] = set()
        for _, buffer in sorted(gains):
            # A buffer dropped before may be a source of this one.
            if given_up.isdisjoint(recomputes.sources(buffer)):
                given_up.add(buffer)
        if not given_up:
            return frozenset(kept)
        kept -= given_up


class Recomputes:
    """Cost of recomputing one more buffer, where `kept` is saved for the backward."""

    def __init__(self, variant: Variant, kept: Set[int], costs: SavingCosts) -> None:
        self._graph, self._problem = variant.graph, variant.problem
        self._kept, self._costs = kept, costs
        self._again = free_ops(variant, kept)
        self._readers: dict[int, list[int]] = {}
        for index, op in enumerate(variant.graph.ops):
            if (op.phase is Phase.BACKWARD and op.digest) or index in self._again:
                for buffer in op.inputs:
                    self._readers.setdefault(buffer, []).append(index)

    def seconds(self, buffer: int, limit: float) -> float:
        """Seconds of the additional ops, plus reads of their sources that the buffer's readers do
        not read anyway; `limit` if it is not less."""
        graph, problem, costs = self._graph, self._problem, self._costs
        readers = self._readers.get(buffer, [])
        first = next((index for index in readers if graph.ops[index].phase is Phase.BACKWARD), None)
        if first is None:
            return limit
        read_anyway = {b for index in readers for b in graph.ops[index].inputs}
        total, held_anew = 0.0, 0
        for index in self._ops(buffer):
            if not problem.ops[index].recomputable or not problem.may_replay(index, first):
                held_anew += sum(graph.buffers[b].size_bytes for b in graph.ops[index].outputs)
            else:
                total += problem.ops[index].cost
            if total >= limit or held_anew >= graph.buffers[buffer].size_bytes:
                return limit
        return total + sum(costs.to_read.get(b, 0.0) for b in self.sources(buffer) - read_anyway)

    def sources(self, buffer: int) -> set[int]:
        """The saved buffers that a buffer is recomputed from."""
        ops = list(self._ops(buffer))
        made = {b for index in ops for b in self._graph.ops[index].outputs}
        return {b for index in ops if self._problem.ops[index].recomputable
                for b in self._graph.ops[index].inputs if b not in made}

    def _ops(self, buffer: int) -> Iterator[int]:
        """The ops that would run again in addition, or whose result would have to be saved."""
        graph = self._graph
        pending, seen = [graph.buffers[buffer].producer], set()
        while pending:
            index = pending.pop()
            if index in seen or index in self._again:
                continue
            seen.add(index)
            yield index
            if self._problem.ops[index].recomputable:
                pending.extend(
                    graph.buffers[b].producer for b in graph.ops[index].inputs
                    if b not in self._kept and not graph.buffers[b].kept_to_end)


def least_cost(
    variant: Variant, net_bytes: int, to_save: Mapping[int, float], seconds: float
) -> float:
    """Lower bound on the cost of any choice within `net_bytes`, in the unit of the problem and
    found in about `seconds`; infinite if no choice is feasible.  `to_save`: cost of saving each
    buffer.

    Each choice pays for its recomputation at least once, and for kernel writes and reads that
    happen only because a result is saved.  Memory is checked at the end of forward and loss, at the
    peak of the step without recomputation, and where the cheapest choice so far exceeds the budget:
    the time-cut model of the solvers with a price on each saved result.  Generated code may use
    less than the problem counts (results that never leave a kernel); the caller adds the difference
    seen in traced steps to the budget.
    """
    problem, ops = variant.problem, variant.graph.ops
    end = next((i for i, op in enumerate(ops) if op.phase is Phase.BACKWARD), 0) - 1
    if end < 0:
        return problem.keep_all_cost
    fullest = unroll(problem, problem.keep_all_schedule).peak_position
    cuts, runs = tuple(sorted({end, max(fullest, end)})), runs_of(problem)
    deadline, extra, work = time.monotonic() + seconds, 0.0, 0.0
    while work < _WORK:
        solution = CutModel(
            problem, net_bytes, cuts, runs=runs, retention_costs=to_save).solve(
                deadline - time.monotonic(), nodes=_NODES, gap=_GAP * problem.keep_all_cost)
        extra, work = max(extra, solution.extra_bound), work + solution.work
        if solution.retained is None or not solution.solved:
            break
        exceeding = as_order(schedule_saving(variant, solution.retained[0]))
        found = next_cuts(problem, net_bytes, exceeding, cuts, first=end)
        if found is None:
            break
        cuts = found
    return problem.keep_all_cost + extra


_TRIES = 3
"""Budgets that the solver is asked for, for one kernel order: the first and its corrections."""
_CLOSE_ENOUGH = 0.02
"""Fraction of the budget that may remain unused."""
_MARGIN = 0.004
"""Fraction of the budget that a correction leaves for a slightly different codegen overhead."""
_SHARE_OF_SOLVER = 0.1
"""Fraction of the time limit for one schedule, counted as work."""
_LEAST_SECONDS = 2.0
"""Work of the search for the least memory, whatever the time limit; it may take ten times as long.
"""
_COST_OF_FREE = 1e-3
"""Fraction of its cost that the solver counts for an op that is free to recompute: enough to break
ties between schedules."""


@dataclass(frozen=True)
class Candidate:
    """A schedule with its compiled step."""

    schedule: Schedule
    spec: RewriteSpec
    step: CompiledStep
    cost: float

    @property
    def peak_bytes(self) -> int:
        """Peak of the compiled step above resident memory."""
        return self.step.peak_bytes


def spec_for_inductor(prepared: PreparedStep, variant: Variant, schedule: Schedule) -> RewriteSpec:
    """The rewrite spec of a schedule, without in-place reuses, which Inductor chooses itself."""
    spec = build_spec(prepared, variant, unroll(variant.problem, schedule))
    return replace(spec, backend="inductor", regions=tuple(
        replace(region, inplace_reuses=()) for region in spec.regions))


class CompiledSearch:
    """The schedules tried for one graph variant of a step; mutable, since it caches them."""

    def __init__(self, prepared: PreparedStep, variant: Variant, effort: Effort) -> None:
        """The time limit of `effort` begins now."""
        assert variant.compiled is not None
        self.prepared, self.variant, self.effort = prepared, variant, effort
        self.breakdown, self._costs = variant.compiled, variant.compiled.saving_costs
        self.started = time.monotonic()
        self.is_cut_off = False
        """True if the time limit prevented a try."""
        self.followed: list[Candidate] = []
        """Candidates whose code was traced, except Inductor's default, which peaks elsewhere."""

    @property
    def generates_code(self) -> bool:
        """True if schedules are judged by the code that Inductor generates, else by a bound."""
        return self.breakdown.tracer is not None and self.variant.problem.link is None

    # Schedules by the problem's breakdown.

    @cached_property
    def default_schedule(self) -> Schedule:
        """The schedule that saves what Inductor's own partitioner saves."""
        return schedule_saving(self.variant, self.breakdown.saved_by_default)

    @cached_property
    def default_cost(self) -> float:
        """Cost of Inductor's default."""
        return self.cost(self.default_schedule)

    def cost(self, schedule: Schedule) -> float:
        """Seconds of a step by the problem's costs, plus the cost of saving."""
        return self.variant.cost(schedule) + saving_seconds(self.variant, schedule, self._costs)

    def least_cost_within(self, net_bytes: int) -> float:
        """Lower bound on the cost of any schedule within `net_bytes`, by the problem's costs."""
        if self.variant.problem.link is not None:
            return 0.0
        return least_cost(self.variant, net_bytes, self._costs.to_save,
                          max(self._seconds_left(), self._work()))

    @cached_property
    def least(self) -> tuple[int, Schedule]:
        """The least net bytes of a known schedule, by the problem's breakdown, and that schedule.
        """
        try:  # with unfused costs: a schedule other than those of `schedule_within`
            return 0, self._ask(self.variant, 0, _LEAST_SECONDS).schedule
        except Refusal as refusal:
            return refusal.minimum_bytes, refusal.schedule

    def schedule_within(self, net_bytes: int) -> Schedule:
        """The solver's schedule within `net_bytes`, without saving results that are free or cheap
        to recompute.  Raises `solvers.InfeasibleBudget`."""
        if self.variant.problem.link is not None:
            return self._ask(self.variant, net_bytes).schedule
        saved = saved_buffers(self.variant, self._ask(self._priced, net_bytes).schedule)
        saved = without_free(self.variant.graph, saved, self._free)
        return schedule_saving(self.variant, without_cheap(self.variant, saved, self._costs))

    @cached_property
    def _free(self) -> frozenset[int]:
        """Ops that are free to recompute if what Inductor saves by default is saved, except what is
        cheap to recompute."""
        return free_ops(self.variant, without_cheap(
            self.variant, self.breakdown.saved_by_default, self._costs))

    @cached_property
    def _priced(self) -> Variant:
        """The variant with the problem that the solver sees."""
        problem = self.variant.problem
        return replace(self.variant, problem=replace(problem, ops=tuple(
            replace(op, cost=_COST_OF_FREE * op.cost) if index in self._free else op
            for index, op in enumerate(problem.ops))))

    def _ask(self, variant: Variant, net_bytes: int, least_seconds: float = 0.0) -> Result:
        work = max(self._work(), least_seconds)
        seconds = max(self._seconds_left(), work, 10 * least_seconds)
        return solve_variant(variant, net_bytes, replace(self.effort, time_limit=seconds),
                             work_limit=work)

    def _work(self) -> float:
        return _SHARE_OF_SOLVER * (self.effort.work_limit or self.effort.time_limit)

    def _seconds_left(self) -> float:
        """Time until only the code of the whole step can be generated."""
        return (self.started + self.effort.time_limit - self.breakdown.whole_seconds
                - time.monotonic())

    def is_late(self) -> bool:
        """True if there is no time for another try, which is then skipped."""
        self.is_cut_off |= self._seconds_left() <= 0
        return self.is_cut_off

    # Their code.

    @cached_property
    def default_spec(self) -> RewriteSpec:
        """The rewrite spec of Inductor's default."""
        return spec_for_inductor(self.prepared, self.variant, self.default_schedule)

    def default(self) -> Candidate:
        """Inductor's default."""
        return self._evaluated(self.default_schedule, self.default_spec)

    def evaluate(self, schedule: Schedule, kernel_order: bool = False) -> Candidate:
        """Compile a step with this schedule, for a budget, and trace its memory."""
        spec = replace(spec_for_inductor(self.prepared, self.variant, schedule),
                       kernel_order=kernel_order, low_memory_codegen=True)
        self.followed.append(self._evaluated(schedule, spec))
        return self.followed[-1]

    def _evaluated(self, schedule: Schedule, spec: RewriteSpec) -> Candidate:
        if self.effort.progress is not None:
            self.effort.progress("generating the compiled step")
        step = (self.breakdown.estimate(spec) if self.generates_code else
                bound_without_code(self.variant, schedule, is_ordered=spec.kernel_order))
        return Candidate(schedule, spec, step, self.cost(schedule))

    def confirmed(self, found: Candidate) -> Candidate:
        """The candidate with the memory breakdown of the whole step, regardless of time: a plan's
        peak is never estimated from a part."""
        if not self.generates_code:
            return found
        if self.effort.progress is not None:
            self.effort.progress("generating the whole compiled step")
        return replace(found, step=self.breakdown.trace(found.spec))

    @property
    def overstated_bytes(self) -> int:
        """The largest amount by which the problem's breakdown exceeded the code's memory."""
        return max([0, *(self.variant.net_peak_bytes(found.schedule) - found.peak_bytes
                         for found in self.followed)])

    # Both.

    def is_worth(self, best: Candidate) -> bool:
        """True if this search may find a cheaper candidate than `best`, of another search: copies
        of gradients are for budgets near the least, and chunks cost time by themselves."""
        if self.is_late():
            return False
        return best.spec.kernel_order if self.variant.low_peak else self.default_cost < best.cost

    def within(self, net_bytes: int) -> Candidate | None:
        """The cheapest candidate found whose compiled step uses at most `net_bytes`, which
        Inductor's default exceeds."""
        variant = self.variant
        if (variant.low_peak or variant.chunks * variant.inner_chunks > 1) and self.is_late():
            return None
        limit_bytes = net_bytes
        for _ in range(_TRIES):
            # Kernels in the order of the plan use less memory, and more time.
            found = (self._in_order(False, limit_bytes)
                     if self.generates_code and not self.variant.low_peak else None)
            found = found or self._in_order(True, limit_bytes)
            if found is None:
                return None
            whole = self.confirmed(found)
            if whole.peak_bytes <= net_bytes:
                return whole
            excess_bytes = whole.peak_bytes - net_bytes
            limit_bytes = max(0, limit_bytes - excess_bytes - int(_MARGIN * net_bytes))
        return None

    def _in_order(self, kernel_order: bool, net_bytes: int) -> Candidate | None:
        """Like `within`, with one kernel order, but estimates repeated layers from one copy."""
        best: Candidate | None = None
        asked_bytes = net_bytes
        for _ in range(_TRIES):
            if self.followed and self.is_late():
                break
            try:
                found = self.evaluate(self.schedule_within(asked_bytes), kernel_order)
            except Refusal as refusal:
                if best is not None or refusal.minimum_bytes <= asked_bytes:
                    break
                asked_bytes = refusal.minimum_bytes
                continue
            left_bytes = net_bytes - found.peak_bytes
            if left_bytes >= 0 and (best is None or found.cost < best.cost):
                best = found
            if 0 <= left_bytes <= _CLOSE_ENOUGH * net_bytes or (
                    best is not None and best.cost <= self.default_cost):
                break
            # The next schedule is assumed to have the same codegen overhead.
            asked_bytes = max(0, asked_bytes + left_bytes - int(_MARGIN * net_bytes))
        return best

    def smallest(self, net_bytes: int = 0) -> Candidate:
        """A candidate whose compiled step uses at most `net_bytes`, else the smallest of a few that
        depend neither on it nor on time: planning within what that one uses finds it again."""
        least_bytes, bare = self.least
        tries = [(bare, True), (bare, False)]
        with suppress(Refusal):
            tries.insert(0, (self.schedule_within(least_bytes), True))
        best = self.evaluate(*tries[0])
        for schedule, kernel_order in tries[1:]:
            if best.peak_bytes <= net_bytes:
                break
            best = min(best, self.evaluate(schedule, kernel_order),
                       key=lambda found: found.peak_bytes)
        return best
