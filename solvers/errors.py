"""Errors of solvers; `planner` re-raises them and adds what the bytes stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.solvers.actions import Schedule


class IllegalSchedule(ValueError):
    """The schedule breaks a rule of `solvers.problem`; the message names run and rule."""


class InfeasibleBudget(ValueError):
    """No schedule within the budget was found, or none can exist."""

    def __init__(self, budget_bytes: int, minimum_bytes: int, message: str | None = None,
                 schedule: Schedule = (), lower_bound: float = 0.0,
                 proven_minimum_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        """The requested budget."""
        self.minimum_bytes = minimum_bytes
        """The smallest peak found by a search that does not depend on the budget; solving with it
        succeeds."""
        self.proven_minimum_bytes = proven_minimum_bytes
        """No schedule peaks below it; `None` if nothing is proven."""
        self.schedule = schedule
        """A schedule that peaks at `minimum_bytes`; empty if it is not available."""
        self.lower_bound = lower_bound
        """No schedule within the budget costs less; in the unit of the problem."""
        proven = "" if not proven_minimum_bytes else (
            f"; nothing below {proven_minimum_bytes} bytes is possible")
        super().__init__(message or (
            f"no schedule fits in {budget_bytes} bytes; the smallest budget that works is "
            f"{minimum_bytes} bytes{proven}"))

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.budget_bytes, self.minimum_bytes, str(self), self.schedule,
                             self.lower_bound, self.proven_minimum_bytes))
