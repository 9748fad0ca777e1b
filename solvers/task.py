"""The one signature of every algorithm: a `Task` in, a `Proposal` out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from planner.solvers.actions import Order, Schedule
from planner.solvers.problem import Problem

Progress = Callable[[str], None]
"""Callback that receives lines of text about the state of the solver."""


@dataclass(frozen=True, slots=True)
class Task:
    """The input of an algorithm."""

    problem: Problem
    budget_bytes: int
    deadline: float
    """Value of `time.monotonic()` at which the algorithm should be done."""
    seed: int = 0
    warm_start: Order | None = None
    """A legal schedule to start from, within the budget or not."""
    ideas: tuple[Order, ...] = ()
    """Legal schedules, within the budget or not, whose recomputations are worth offering."""
    progress: Progress | None = None
    work_limit: float | None = None
    """Work (see `solvers.milp.MilpResult`) after which a search is to end.  `None`: the default;
    infinite: until the deadline.  Unless it is infinite, the result depends on the machine only if
    the deadline ends the search."""

    @property
    def seconds_left(self) -> float:
        """Time until the deadline, not below 0."""
        return max(0.0, self.deadline - time.monotonic())

    def report(self, message: str) -> None:
        """Pass one line to the progress callback."""
        if self.progress is not None:
            self.progress(message)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The output of an algorithm; `solvers.solve` evaluates it with the simulator."""

    schedule: Schedule
    """The cheapest schedule found within the budget; without one, the schedule with the smallest
    peak found, from which the smallest budget that works is reported."""
    lower_bound: float = 0.0
    """No legal schedule within the budget costs less (total cost, not overhead)."""
    late: bool = False
    """True if the deadline influenced which schedule was found, so that the same search on a faster
    or slower machine may end with another one."""
    interrupted: bool = False
    """True if the user ended the search (`KeyboardInterrupt`) after a schedule was found."""


Algorithm = Callable[[Task], Proposal]
