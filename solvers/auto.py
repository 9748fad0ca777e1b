"""The portfolio: cheap methods first, each passing its schedule to the next, until one is proven.

The stages are: a first schedule (`solvers.incumbent`: a lazy walk, or the search for the smallest
peak, which alone decides that nothing fits); the time-cut MILP with one cut; candidate
recomputations and a first further cut; the simple stages (square root, dynamic program, checkpoints
with eviction between them); then turns of the MILP (`solvers.ilp`) and of local search.  The result
is the best schedule and the best bound of all stages.  Of a large problem with a wide gap the
checkpoints with eviction come before all turns.

Work is counted, not timed.  The search ends with a proof; after its work (`WORK`); after `PATIENCE`
of it without a gain; when the gap is too small to be worth the rest (`GOOD_ENOUGH`); or when the
MILP is settled and local search finds nothing.  A search of counted work that starts from a
schedule within the budget leaves out the simple stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from planner.solvers.actions import as_order
from planner.solvers.dp import dp
from planner.solvers.ilp import CutSearch, one_cut_bound
from planner.solvers.incumbent import Incumbent
from planner.solvers.local_search import improve, move_work
from planner.solvers.minimum import working_set_floor
from planner.solvers.nested import nested
from planner.solvers.sqrt_n import sqrt_n
from planner.solvers.task import Algorithm, Proposal, Task

WORK, WORK_PER_OP = 2.5, 5e-4
"""Default work (see `solvers.milp.MilpResult`) of the whole search."""
WORK_OF_GAP, WIDEST_GAP = 100.0, 0.1
"""Additional work of a default search, times the gap that the first turns leave, or at most this
one."""
MOST_WORK_PER_OP = 0.06
"""The gap adds work up to this, which is little for a problem of a few ops."""
PATIENCE = 0.35
"""The search ends after this fraction of its work without a gain of `WORTH`."""
WORTH = 1e-3
"""Smallest gain, as a fraction of the keep-all cost, that justifies more work."""
PATIENCE_OF_SETTLED = 0.15
"""Like `PATIENCE`, once the MILP is settled; of the work without that of the gap."""
LOCAL_SHARE = 0.5
"""Work of local search relative to the MILP; less if it finds nothing."""
FIRST_TURN_MOVES = 6_000
FIRST_TURNS = 3
"""Turns of the MILP before the simple stages and local search."""
LARGE = 2_000
"""Ops of a problem in which the checkpoints with eviction take seconds.  They come first where the
gap is wide, as a turn of the MILP may take all the time there, and are left out where it is not."""
TURNS_TO_FIT = 11
"""Turns of the MILP that look for a fitting schedule in a search without a limit on its work."""
GOOD_ENOUGH = 0.001
"""A gap, as a fraction of the keep-all cost, that is not worth the second half of the work.  In the
first half the threshold shrinks with the cube of the work: an eighth of it after a quarter."""


def auto(task: Task) -> Proposal:
    """Return the best result of all stages within the work and the time."""
    incumbent = Incumbent(task)
    goes_on = task.work_limit not in (None, math.inf) and incumbent.fits
    work_limit = (WORK + WORK_PER_OP * len(task.problem) if task.work_limit is None
                  else task.work_limit)
    try:
        if not incumbent.start() and work_limit < math.inf:
            incumbent.raise_bound(one_cut_bound(task))
        elif not incumbent.proven and working_set_floor(task.problem) <= task.budget_bytes:
            _search(replace(task, work_limit=work_limit), incumbent, goes_on=goes_on,
                    gap_counts=task.work_limit is None)
    except KeyboardInterrupt:
        if not incumbent.fits:
            raise
        incumbent.interrupted = True
    return incumbent.proposal()


def _search(task: Task, incumbent: Incumbent, *, goes_on: bool, gap_counts: bool) -> None:
    """Take turns of the MILP and of local search, balanced by work."""
    assert task.work_limit is not None
    is_timed = task.work_limit == math.inf
    whole = task.seconds_left if is_timed else task.work_limit
    patience_of_settled = PATIENCE_OF_SETTLED * whole
    search = CutSearch(task, incumbent)
    simple_stages, is_large = not goes_on, len(task.problem) > LARGE
    turn, moves, fruitless_work, local_work = 0, FIRST_TURN_MOVES, 0.0, 0.0
    owed = 0.0  # work of local search that the MILP has to match before it goes on
    level, gained_at = incumbent.gap, 0.0
    while not incumbent.proven and task.seconds_left > 0:
        work = search.work + local_work
        if simple_stages and turn == 0 and is_large and incumbent.gap > WIDEST_GAP:
            _offer(task, incumbent, (nested,))
        if turn >= FIRST_TURNS or work >= whole:
            if simple_stages:
                _offer(task, incumbent, (sqrt_n, dp) if is_large else (sqrt_n, dp, nested))
                simple_stages = False
            if gap_counts and incumbent.fits:
                whole = min(whole + WORK_OF_GAP * min(incumbent.gap, WIDEST_GAP),
                            max(whole, MOST_WORK_PER_OP * len(task.problem)))
                search.work_limit = whole
                gap_counts = False
        spent = 1 - task.seconds_left / whole if is_timed else work / whole
        if spent >= 1 or incumbent.gap < GOOD_ENOUGH * min(1.0, 2 * spent) ** 3:
            break
        if incumbent.gap < level - WORTH:
            level, gained_at = incumbent.gap, work
        if not is_timed and turn > FIRST_TURNS and work - gained_at > PATIENCE * whole:
            break
        if search.settled and fruitless_work > patience_of_settled:
            break
        turn += 1
        if not incumbent.fits and (search.settled or turn > TURNS_TO_FIT):
            incumbent.search_on()
            if not incumbent.fits:
                break
        if not search.settled and (
                turn <= FIRST_TURNS or search.work <= owed or not incumbent.fits):
            search.turn()
            continue
        before = incumbent.cost
        incumbent.offer(improve(
            task.problem, task.budget_bytes, incumbent.schedule, seed=task.seed + turn - 1,
            moves=moves, time_limit=task.seconds_left))
        incumbent.report("local search")
        work = moves * move_work(task.problem)
        local_work += work
        if incumbent.cost < before:
            fruitless_work = 0.0
            owed += work / LOCAL_SHARE
        else:
            fruitless_work += work
            owed = search.work + fruitless_work / LOCAL_SHARE
        moves *= 2


def _offer(task: Task, incumbent: Incumbent, stages: Sequence[Algorithm]) -> None:
    for stage in stages:
        if not incumbent.proven and task.seconds_left > 0:
            incumbent.offer(as_order(stage(task).schedule))
            incumbent.report(stage.__name__)
