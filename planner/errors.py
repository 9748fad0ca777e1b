"""What the planner raises.  Every error says what was expected, what came, and what to do.

Arguments that are wrong in themselves raise `TypeError` or `ValueError`; everything that needs a
look at the model, the budget or a file raises a subclass of `PlannerError`.
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
        """The budget that was asked for."""
        self.minimum_bytes = minimum_bytes
        """The smallest peak found, by a search that depends neither on the budget nor on the
        machine's load; planning with it succeeds."""
        self.proven_minimum_bytes = proven_minimum_bytes
        """Nothing below it is possible; `None` where nothing is proven."""
        self.bottleneck = bottleneck
        """What holds that much memory at the minimum, by module and op."""
        self.alternatives = dict(alternatives or {})
        """What to `allow`, to the smallest budget in bytes that a plan would then meet; only what
        is smaller than `minimum_bytes`."""
        super().__init__(message or (
            f"the training step does not fit in {budget_bytes:,} bytes: the smallest budget that "
            f"works is {minimum_bytes:,} bytes (budget={minimum_bytes})"
            f"{_proven_words(minimum_bytes, proven_minimum_bytes)}. {bottleneck}"))

    def with_alternatives(self, alternatives: Mapping[tuple[str, ...], int]) -> InfeasibleBudget:
        """The same refusal, which names them too."""
        words = "".join(f" With allow={allow!r}, {least:,} bytes would do."
                        for allow, least in alternatives.items())
        return self.worded(f"{self}{words}", alternatives)

    def worded(self, message: str, alternatives: Mapping[tuple[str, ...], int] | None = None
               ) -> InfeasibleBudget:
        """The same refusal in other words."""
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
    """The file is no plan, or not one that this version reads."""
