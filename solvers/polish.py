"""Drop dispensable recomputations of a schedule, under the budget.

A recomputation is dropped if the instance before it can live on instead without the peak leaving
the budget; recomputations that only served it go as well.  The most expensive are tried first,
until none can go: the result is minimal, not minimum.
"""

from __future__ import annotations

from planner.solvers.incremental import EditableTimeline
from planner.solvers.problem import Order, Problem


def drop_recomputes(problem: Problem, budget_bytes: int, schedule: Order) -> Order:
    """Return a schedule without dispensable recomputations.  It costs no more than `schedule` and
    peaks within the larger of the budget and the peak of `schedule`."""
    if len(schedule) == len(problem):
        return schedule
    timeline = EditableTimeline(problem, schedule)
    limit = max(budget_bytes, timeline.peak_bytes)
    dropped = True
    while dropped:
        dropped = False
        again = sorted((-problem.ops[timeline.op_at[key]].cost, -key)
                       for runs in timeline.runs_of for key in runs[1:])
        for _, negative in again:
            if -negative in timeline.op_at:
                timeline.remove_with_causes(-negative)
                if timeline.peak_bytes <= limit:
                    timeline.commit()
                    dropped = True
                else:
                    timeline.rollback()
    return timeline.schedule
