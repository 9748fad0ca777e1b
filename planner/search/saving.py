"""Schedules defined by the buffers saved for the backward, which alone determine Inductor's code;
and results that a compiled step should recompute even if there is memory to save them.

The recomputations of such a schedule follow: everything else that the backward needs runs again
just before its first use.

Model of the world: Inductor computes a pointwise result in the kernel that reads it.  Saving it
costs a write and a read; recomputing it costs arithmetic, and memory traffic only for inputs that
are not read anyway.  On a CPU, writing and reading a dropout mask takes longer than drawing it
again.

Blind spots: those of `graph_capture.inductor.within_kernels`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Set

from planner._graph_capture.training_graph import Phase, SavingCosts, TrainingGraph
from planner.solvers.actions import as_order
from planner.solvers.cut_model import CutModel
from planner.solvers.problem import Schedule
from planner.solvers.repetition import runs_of
from planner.solvers.schedule_from_cuts import next_cuts
from planner.solvers.simulator import unroll
from planner.step.variant import Variant

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
        self._graph, self._problem, self._kept, self._costs = (
            variant.graph,
            variant.problem,
            kept,
            costs,
        )
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
