"""How much a search may spend, and on which solver."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.progress import Progress, active

USUAL_TIME_LIMIT = 60.0
"""Seconds.  Who asks for more wants a search that goes on until then."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How a budget is to be met."""

    solver: str = "auto"
    time_limit: float = USUAL_TIME_LIMIT
    """Seconds; soft.  A search ends by itself when more of it is not worth it."""
    is_thorough: bool = False
    """Whether a search of a step that runs op by op goes on until the time limit."""
    work_limit: float | None = None
    """Seconds of some machine: what a search that counts its work takes for the time limit, so that
    its result does not depend on how long capture took; `None`: the time limit."""
    seed: int = 0
    progress: Progress | None = field(default_factory=active)
