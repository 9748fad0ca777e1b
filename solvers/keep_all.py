"""Keep everything: each op runs once."""

from __future__ import annotations

from solvers.task import Proposal, Task


def keep_all(task: Task) -> Proposal:
    """The plain order; optimal wherever it fits."""
    return Proposal(task.problem.plain_schedule, task.problem.plain_cost)
