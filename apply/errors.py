"""What applying a plan raises; `planner` re-raises it as `PlanMismatch`."""

from __future__ import annotations


class GraphMismatch(ValueError):
    """The model is not the one that the plan was made for; the message names the first
    difference."""
