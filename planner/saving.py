"""Schedules by what they save for the backward: all that decides what Inductor generates.

What a schedule recomputes, and when, follows from that: whatever else the backward needs, just
before it is needed first.
"""

from __future__ import annotations

from collections.abc import Set

from graph_capture.training_graph import Phase, TrainingGraph
from solvers.problem import Problem, Schedule
from solvers.simulator import unroll


def schedule_saving(graph: TrainingGraph, problem: Problem, saved: Set[int]) -> Schedule:
    """The schedule that keeps the buffers `saved` (and what may not be recomputed) for the backward
    and computes what else it needs once more, just before it is needed first."""
    schedule: list[int] = []
    available: set[int] = set(saved)

    def is_missing(buffer: int, before: int) -> bool:
        producer = graph.buffers[buffer].producer
        return (buffer not in available and problem.ops[producer].recomputable
                and not graph.buffers[buffer].kept_to_end
                and problem.may_replay(producer, before))

    def remake(buffer: int, before: int) -> None:
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
                    remake(buffer, index)
        schedule.append(index)
    return tuple(schedule)


def saved_buffers(graph: TrainingGraph, problem: Problem, schedule: Schedule) -> frozenset[int]:
    """Buffers of the forward whose first result the backward reads."""
    timeline = unroll(problem, schedule)
    seen: set[int] = set()
    end = 0
    for position, index in enumerate(schedule):
        if index not in seen and graph.ops[index].phase is not Phase.BACKWARD:
            end = position
        seen.add(index)
    return frozenset(
        instance.storage for instance in timeline.instances
        if instance.birth <= end < instance.death
        and graph.ops[graph.buffers[instance.storage].producer].phase is Phase.FORWARD)


def free_ops(graph: TrainingGraph, problem: Problem, saved: Set[int]) -> frozenset[int]:
    """Ops that Inductor recomputes by itself: fused into the kernels that read them."""
    schedule = schedule_saving(graph, problem, saved)
    seen: set[int] = set()
    again = set()
    for index in schedule:
        if index in seen:
            again.add(index)
        seen.add(index)
    return frozenset(again)


def without_free(graph: TrainingGraph, saved: Set[int], free: Set[int]) -> frozenset[int]:
    """`saved` without the buffers that free ops make from what is saved otherwise."""
    known: dict[int, bool] = {}

    def available(buffer: int) -> bool:
        """Whether the backward can have it from buffers that no free op makes."""
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
