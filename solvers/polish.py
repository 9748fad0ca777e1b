"""Drop recomputations that a schedule can do without, under the budget.

A recomputation is dropped where the instance before it can live on instead without the peak
leaving the budget; what was recomputed only for its sake goes with it.  The dearest are tried
first, until none can go: the result is minimal, not minimum.
"""

from __future__ import annotations

from solvers.incremental import EditableTimeline
from solvers.problem import Order, Problem


def drop_recomputes(problem: Problem, budget_bytes: int, schedule: Order) -> Order:
    """A schedule that costs no more than `schedule` and peaks within the larger of the budget and
    the peak of `schedule`, without the recomputations that it can do without."""
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
                _remove_with_causes(timeline, -negative)
                if timeline.peak_bytes <= limit:
                    timeline.commit()
                    dropped = True
                else:
                    timeline.rollback()
    return timeline.schedule


def _remove_with_causes(timeline: EditableTimeline, key: int) -> None:
    """Remove a recomputation and, one after another, those that nothing reads any more."""
    queue = [key]
    while queue:
        here = queue.pop()
        if here not in timeline.op_at:
            continue
        inputs = timeline.problem.ops[timeline.op_at[here]].inputs
        sources = [life[0] for s in inputs if (life := timeline.life(s, here)) is not None]
        timeline.remove(here)
        queue.extend(source for source in sources if _useless(timeline, source))


def _useless(timeline: EditableTimeline, key: int) -> bool:
    """Whether the run with that key is a recomputation whose outputs nothing reads."""
    op = timeline.op_at.get(key)
    if op is None or timeline.runs_of[op][0] == key:
        return False
    for storage in timeline.problem.ops[op].outputs:
        life = timeline.life(storage, key + 1)
        if life is not None and life[1] > key:
            return False
    return True
