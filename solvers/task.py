"""The one signature of every algorithm: a `Task` in, a `Proposal` out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from planner.solvers.actions import Order, Schedule
from planner.solvers.problem import Problem

Progress = Callable[[str], None]
"""Called now and then with one line of text about where the solver stands."""


@dataclass(frozen=True, slots=True)
class Task:
    """What an algorithm is asked for."""

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
    """Work (see `solvers.milp.MilpResult`) after which a search is to end; `None`: as much as is
    worth it; infinite: it works until the deadline.  With a finite limit, or none, the result
    depends on the machine only where the deadline strikes."""

    @property
    def seconds_left(self) -> float:
        """Time until the deadline, not below 0."""
        return max(0.0, self.deadline - time.monotonic())

    def report(self, message: str) -> None:
        """Hand one line to whoever watches."""
        if self.progress is not None:
            self.progress(message)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What an algorithm found; `solvers.solve` lets the simulator judge it."""

    schedule: Schedule
    """The cheapest schedule found within the budget; where there is none, the one with the
    smallest peak found, which then tells the smallest budget that works."""
    lower_bound: float = 0.0
    """No legal schedule within the budget costs less (total cost, not overhead)."""
    late: bool = False
    """The deadline had a part in which schedule was found, so that the same search on a faster or
    slower machine may end with another one."""
    interrupted: bool = False
    """Whether the user ended the search (`KeyboardInterrupt`) after a schedule was found."""


Algorithm = Callable[[Task], Proposal]
