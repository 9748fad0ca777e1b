"""The time that a search among compiled steps has left.

A limit strikes only between tries: what the solver or Inductor has begun is finished.  So a search
begins nothing that would not leave the time to generate the code of the whole step, which is what a
plan is confirmed by.  Times are by the clock, so that a machine that does other things beside is
known to take longer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.step.compiled_breakdown import CompiledBreakdown

_GRACE = 0.4
"""Part of the limit by which it may be overrun for what has been begun, a bound besides."""


class TimeLeft:
    """The time of one search; mutable, since it learns what its parts take."""

    def __init__(self, limit: float, breakdown: CompiledBreakdown, started: float | None = None
                 ) -> None:
        """`limit` seconds begin now, or began at `started`, of `time.monotonic`."""
        self._breakdown = breakdown
        self.started = time.monotonic() if started is None else started
        self._latest = self.started + (1 + _GRACE) * limit
        self.deadline = min(self.started + limit, self._latest - breakdown.whole_seconds)
        """When no more schedules are to be looked for."""
        self.code_seconds = 0.0
        """What it took to follow the code of one step, at most."""
        self.is_over = False
        """Whether the limit kept anything from being tried."""

    def is_late(self, solver_seconds: float) -> bool:
        """Whether there is no time for another try, which is then left out: the limit has struck,
        or a try would leave none for the code of the whole step."""
        done = time.monotonic() + solver_seconds + self.code_seconds + self._breakdown.whole_seconds
        self.is_over |= time.monotonic() > self.deadline or done > self._latest
        return self.is_over

    def allows_whole(self) -> bool:
        """Whether there is time to generate the code of the whole step."""
        return time.monotonic() + self._breakdown.whole_seconds <= self._latest
