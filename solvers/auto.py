"""The ladder: cheap methods first, each handing its schedule to the next, until one is proven.

Keep all, lazy rematerialization, the time-cut MILP with one cut, anchors, slots and a first further
cut, square root, dynamic program, then turns of the MILP (`solvers.ilp`) and of local search.  The
result is the best of all rungs, with the best bound of all.
The search ends with a proof, with the time, where the MILP has said all it can and local search has
found nothing for `PATIENCE` of the time limit, or where the gap is too small to be worth the rest
of the time (`GOOD_ENOUGH`).  A search of counted work that goes on from a schedule within the
budget leaves out square root and dynamic program.
"""

from __future__ import annotations

from solvers.actions import as_order
from solvers.dp import dp
from solvers.ilp import CutSearch
from solvers.incumbent import Incumbent
from solvers.local_search import improve
from solvers.sqrt_n import sqrt_n
from solvers.task import Proposal, Task

PATIENCE = 0.15
LOCAL_SHARE = 0.5
"""What local search works in comparison to the MILP; less where it finds nothing."""
FIRST_TURN_MOVES = 6_000
MOVE_SECONDS, MOVE_SECONDS_PER_OP = 3e-5, 2e-8
"""What a move takes, about."""
FIRST_TURNS = 4
"""Turns of the MILP before the simple rungs and local search have theirs."""
GOOD_ENOUGH = 0.001
"""A gap (as a fraction of the keep-all cost) that is not worth the second half of the time limit;
in the first half it has to be smaller by the cube of the time: an eighth of it after a quarter."""


def auto(task: Task) -> Proposal:
    """The best of all rungs within the time limit."""
    incumbent = Incumbent(task)
    # In deep models the simple rungs take as long as all else; what the work is to go on from has
    # been through them for another budget.
    goes_on = task.work_limit is not None and incumbent.fits
    incumbent.start()
    if not incumbent.possible or incumbent.proven:
        return incumbent.proposal()
    whole = task.work_limit or task.seconds_left
    search = CutSearch(task, incumbent)
    turn, moves, fruitless_work, local_work = 0, FIRST_TURN_MOVES, 0.0, 0.0
    owed = 0.0  # work of local search that the MILP has to match before it goes on
    while not incumbent.proven and task.seconds_left > 0:
        spent = (1 - task.seconds_left / whole if task.work_limit is None
                 else (search.work + local_work) / whole)
        if spent >= 1 or incumbent.gap < GOOD_ENOUGH * min(1.0, 2 * spent) ** 3:
            break
        # Turns are shared out by work, which is counted, so that the result does not depend on
        # what else the machine does.
        if not search.settled and (turn < FIRST_TURNS or search.work <= owed):
            search.turn()
            turn += 1
            if turn == FIRST_TURNS and not goes_on:
                _offer_simple_rungs(task, incumbent)
            if not incumbent.ensure_fit(last=search.tried_slots) and search.tried_slots:
                break
            continue
        if not incumbent.ensure_fit():  # the MILP has nothing more to say: no schedule fits
            break
        if search.settled and fruitless_work > PATIENCE * whole:
            break
        before = incumbent.cost
        incumbent.offer(improve(
            task.problem, task.budget_bytes, incumbent.schedule, seed=task.seed + turn,
            moves=moves, time_limit=task.seconds_left))
        incumbent.report("local search")
        turn += 1
        work = moves * (MOVE_SECONDS + MOVE_SECONDS_PER_OP * len(task.problem))
        local_work += work
        if incumbent.cost < before:
            fruitless_work, moves = 0.0, 2 * moves
            owed += work / LOCAL_SHARE
        else:
            fruitless_work += work
            owed = search.work + fruitless_work / LOCAL_SHARE
            moves *= 1 + search.settled
    incumbent.ensure_fit()
    return incumbent.proposal()


def _offer_simple_rungs(task: Task, incumbent: Incumbent) -> None:
    for rung in (sqrt_n, dp):
        if not incumbent.proven:
            incumbent.offer(as_order(rung(task).schedule))
            incumbent.report(rung.__name__)
