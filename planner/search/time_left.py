"""Remaining time of a search among compiled steps.

The limit applies between tries only: the solver and Inductor finish what they have begun.  So a
search begins nothing that would leave no time to generate the code of the whole step, which
confirms a plan.  Times are wall time, so that a busy machine counts as slower.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.step.compiled_breakdown import CompiledBreakdown

_GRACE = 0.4
"""Fraction by which the limit may be exceeded to finish begun work, including a bound."""


class TimeLeft:
    """The time of one search; mutable, since it records durations."""

    def __init__(self, limit: float, breakdown: CompiledBreakdown, started: float | None = None
                 ) -> None:
        """The limit of `limit` seconds begins now, or at `started` in `time.monotonic`."""
        self._breakdown = breakdown
        self.started = time.monotonic() if started is None else started
        self._latest = self.started + (1 + _GRACE) * limit
        self.deadline = min(self.started + limit, self._latest - breakdown.whole_seconds)
        """Time after which no more schedules are searched."""
        self.code_seconds = 0.0
        """The longest time needed to trace the code of one step."""
        self.is_over = False
        """True if the limit prevented any try."""

    def is_late(self, solver_seconds: float) -> bool:
        """True if there is no time for another try, which is then skipped: the limit is reached, or
        a try would leave no time for the code of the whole step."""
        done = time.monotonic() + solver_seconds + self.code_seconds + self._breakdown.whole_seconds
        self.is_over |= time.monotonic() > self.deadline or done > self._latest
        return self.is_over

    def allows_whole(self) -> bool:
        """True if there is time to generate the code of the whole step."""
        return time.monotonic() + self._breakdown.whole_seconds <= self._latest
