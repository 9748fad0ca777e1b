"""How much a search may spend, and on which solver."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.progress import Progress, active


@dataclass(frozen=True, slots=True)
class Effort:
    """How a budget is to be met."""

    solver: str = "auto"
    time_limit: float = 60.0
    """Seconds; soft."""
    work_limit: float | None = None
    """Seconds of some machine: what a search that counts its work takes for the time limit, so that
    its result does not depend on how long capture took; `None`: the time limit."""
    seed: int = 0
    progress: Progress | None = field(default_factory=active)
