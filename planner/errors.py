"""Errors of the planner.  Every message says what was expected, what was given, and what to do.

Arguments that are invalid by themselves raise `TypeError` or `ValueError`; errors that depend on
the model, the budget or a file are subclasses of `PlannerError`.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner._apply.errors import PlanMismatch
from planner._graph_capture.errors import CaptureError, PlannerError, UnsupportedTorch

__all__ = ["CaptureError", "InfeasibleBudget", "PlanFileError", "PlanMismatch", "PlannerError",
           "UnsupportedTorch"]


class InfeasibleBudget(PlannerError, ValueError):
    """The training step does not fit in the budget, whatever is recomputed."""

    def __init__(self, budget_bytes: int, minimum_bytes: int, bottleneck: str,
                 message: str | None = None,
                 alternatives: Mapping[tuple[str, ...], int] | None = None,
                 proven_minimum_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        """The requested budget."""
        self.minimum_bytes = minimum_bytes
        """The smallest peak found, by a search that depends neither on the budget nor on the
        machine's load; planning succeeds with it as the budget."""
        self.proven_minimum_bytes = proven_minimum_bytes
        """Proven lower bound of the peak; `None` if nothing is proven."""
        self.bottleneck = bottleneck
        """The memory in use at the minimum peak, by module and op."""
        self.alternatives = dict(alternatives or {})
        """For other values of `allow`, the smallest budget in bytes that a shorter search finds
        feasible; only those below `minimum_bytes`."""
        super().__init__(message or (
            f"the training step does not fit in {budget_bytes:,} bytes: the smallest budget that "
            f"works is {minimum_bytes:,} bytes (budget={minimum_bytes})"
            f"{_proven_words(minimum_bytes, proven_minimum_bytes)}. {bottleneck}"))

    def with_alternatives(self, alternatives: Mapping[tuple[str, ...], int]) -> InfeasibleBudget:
        """A copy of the error that also names the alternatives."""
        words = "".join(f" With allow={allow!r}, {least:,} bytes would do."
                        for allow, least in alternatives.items())
        return self.worded(f"{self}{words}", alternatives)

    def worded(self, message: str, alternatives: Mapping[tuple[str, ...], int] | None = None
               ) -> InfeasibleBudget:
        """A copy of the error with another message."""
        return InfeasibleBudget(
            self.budget_bytes, self.minimum_bytes, self.bottleneck, message,
            self.alternatives if alternatives is None else alternatives,
            self.proven_minimum_bytes)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.budget_bytes, self.minimum_bytes, self.bottleneck, str(self),
                             self.alternatives, self.proven_minimum_bytes))


def _proven_words(minimum_bytes: int, proven_bytes: int | None) -> str:
    if not proven_bytes:
        return ""
    if proven_bytes >= minimum_bytes:
        return ", the smallest possible"
    return f", and nothing below {proven_bytes:,} bytes is possible"


class PlanFileError(PlannerError, ValueError):
    """The file is not a plan, or not one that this version can read."""
