"""Solver and limits of a search."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.progress import Progress, active

USUAL_TIME_LIMIT = 60.0
"""Seconds.  Above this limit, a search continues until the limit."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Solver and limits of a search."""

    solver: str = "auto"
    time_limit: float = USUAL_TIME_LIMIT
    """Seconds; soft.  A search ends earlier when more of it is not worth it."""
    is_thorough: bool = False
    """If True, a search of a step that runs op by op continues until the time limit."""
    work_limit: float | None = None
    """Time limit, in nominal seconds, of a search that counts its work, so that its result does not
    depend on the duration of capture; `None`: the time limit."""
    progress: Progress | None = field(default_factory=active)
