"""The ladder: cheap methods first, each handing its schedule to the next, until one is proven.

Working-set floor, keep all, square root, dynamic program, time-cut MILP.  The result is the best of
all rungs, with the best bound of all.
"""

from __future__ import annotations

from solvers.dp import dp
from solvers.ilp import search_cuts
from solvers.incumbent import Incumbent
from solvers.sqrt_n import sqrt_n
from solvers.task import Proposal, Task


def auto(task: Task) -> Proposal:
    """The best of all rungs within the time limit."""
    incumbent = Incumbent(task)
    for rung in (sqrt_n, dp):
        if incumbent.proven or task.seconds_left <= 0:
            break
        incumbent.offer(rung(task).schedule)
        incumbent.report(rung.__name__)
    if incumbent.ensure_fit():
        search_cuts(task, incumbent)
    return incumbent.proposal()
