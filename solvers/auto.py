"""The ladder: cheap methods first, each handing its schedule to the next, until one is proven.

Keep all, lazy rematerialization, the time-cut MILP with one cut, square root, dynamic program, then
rounds of the MILP in turns with local search.  The result is the best of all rungs, with the best
bound of all.
The search ends with a proof, with the time, where the MILP has said all it can and local search has
found nothing for `PATIENCE` of the time limit, or, once half of the time is over, where the gap is
below `GOOD_ENOUGH`.
"""

from __future__ import annotations

from solvers.dp import dp
from solvers.ilp import CutSearch
from solvers.incumbent import Incumbent
from solvers.local_search import improve
from solvers.sqrt_n import sqrt_n
from solvers.task import Proposal, Task

PATIENCE = 0.15
MOVES_PER_SECOND = 12_000
"""What local search does in a second, about."""
GUARD = 5.0
"""A turn of local search ends in any case after so many times its nominal time."""
GOOD_ENOUGH = 0.002
"""A gap (as a fraction of the plain cost) that is not worth the second half of the time limit."""


def auto(task: Task) -> Proposal:
    """The best of all rungs within the time limit."""
    incumbent = Incumbent(task)
    incumbent.start()
    if not incumbent.possible or incumbent.proven:
        return incumbent.proposal()
    whole = task.seconds_left
    # Turns of local search are measured in moves and their nominal time, so that the result does
    # not depend on what else the machine does.
    search = CutSearch(task, incumbent)
    for rung in (sqrt_n, dp):
        if not incumbent.proven:
            incumbent.offer(rung(task).schedule)
            incumbent.report(rung.__name__)
    turn, turn_seconds, fruitless_seconds = 0, max(0.5, len(task.problem) / 1000), 0.0
    while not incumbent.proven and task.seconds_left > 0:
        if not search.settled:
            search.round()
        if not incumbent.ensure_fit() or (search.settled
                                          and fruitless_seconds > PATIENCE * whole):
            break
        if task.seconds_left < whole / 2 and incumbent.gap < GOOD_ENOUGH:
            break
        if not incumbent.proven:
            turn, before = turn + 1, incumbent.cost
            incumbent.offer(improve(
                task.problem, task.budget_bytes, incumbent.schedule, seed=task.seed + turn,
                moves=int(MOVES_PER_SECOND * turn_seconds), deadline=task.deadline,
                time_limit=GUARD * turn_seconds))
            incumbent.report("local search")
            fruitful = incumbent.cost < before
            fruitless_seconds = 0.0 if fruitful else fruitless_seconds + turn_seconds
            if fruitful or search.settled:
                turn_seconds *= 2
    incumbent.ensure_fit()
    return incumbent.proposal()
