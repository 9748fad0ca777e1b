"""Moments at which a schedule exceeds its budget, and the cuts of a time-cut model that would see
them."""

from __future__ import annotations

from planner.solvers.actions import as_order
from planner.solvers.problem import Order, Problem
from planner.solvers.simulator import Timeline, unroll

Inner = tuple[tuple[int, int], ...]
"""See `solvers.cut_model.CutModel.inner`."""


def next_cuts(problem: Problem, budget_bytes: int, schedule: Order, cuts: tuple[int, ...],
              inner: Inner, *, first: int = 0) -> tuple[tuple[int, ...], Inner] | None:
    """Return the cuts, and the ops within stages, of the next model.  Memory is also constrained
    where `schedule` exceeds the budget most and it was not yet, at op `first` and after; `None` if
    there is no such place."""
    for following, op in violations(problem, unroll(problem, schedule), budget_bytes):
        if following == op and op not in cuts and op >= first:
            return tuple(sorted({*cuts, op})), inner
        if op < following < len(problem) and following - 1 >= first and (
                (following, op) not in inner):
            return (tuple(sorted({*cuts, following - 1, following})),
                    tuple(sorted({*inner, (following, op)})))
    return None


def violations(problem: Problem, timeline: Timeline, budget: int) -> list[tuple[int, int]]:
    """Return the local peaks over the budget, worst first: the first run that comes next, and the
    op that runs (the same one, or one that is recomputed before it)."""
    memory, order = timeline.memory_bytes, as_order(timeline.schedule)
    firsts = {op: position for position, op in reversed(list(enumerate(order)))}
    following = len(problem)
    found: list[tuple[int, int, int]] = []
    for position in range(len(memory) - 1, -1, -1):
        op = order[position]
        if firsts[op] == position:
            following = op
        before = memory[position - 1] if position else -1
        after = memory[position + 1] if position + 1 < len(memory) else -1
        if memory[position] > budget and before <= memory[position] > after:
            found.append((-memory[position], following, op))
    return [(following, op) for _, following, op in sorted(found)]
