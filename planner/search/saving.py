"""Schedules defined by the buffers saved for the backward, which alone determine Inductor's code.

The recomputations of such a schedule follow: everything else that the backward needs runs again
just before its first use.
"""

from __future__ import annotations

from collections.abc import Set

from planner._graph_capture.training_graph import Phase
from planner.solvers.problem import Schedule
from planner.step.variant import Variant


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
