"""Keep everything: each op runs once."""

from __future__ import annotations

from planner.solvers.task import Proposal, Task


def keep_all(task: Task) -> Proposal:
    """Return the keep-all order; optimal if it fits."""
    return Proposal(task.problem.keep_all_schedule, task.problem.keep_all_cost)
