"""How much a search may spend, and on which solver."""

from __future__ import annotations

from dataclasses import dataclass

from planner.progress import Progress


@dataclass(frozen=True, slots=True)
class Effort:
    """How a budget is to be met."""

    solver: str = "auto"
    time_limit: float = 60.0
    """Seconds; soft."""
    seed: int = 0
    progress: Progress | None = None
