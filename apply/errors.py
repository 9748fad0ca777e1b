"""Errors of applying a plan; `planner` re-exports them."""

from __future__ import annotations

from planner._graph_capture.errors import PlannerError


class PlanMismatch(PlannerError):
    """The plan was made for another graph; the message names the first difference."""
