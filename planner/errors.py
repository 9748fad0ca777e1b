"""What the planner raises.  Every error says what was expected, what came, and what to do.

Arguments that are wrong in themselves raise `TypeError` or `ValueError`; everything that needs a
look at the model, the budget or a file raises a subclass of `PlannerError`.
"""

from __future__ import annotations

from collections.abc import Mapping

from apply.errors import PlanMismatch
from graph_capture.errors import CaptureError, PlannerError, UnsupportedTorch

__all__ = ["CaptureError", "InfeasibleBudget", "PlanFileError", "PlanMismatch", "PlannerError",
           "UnsupportedTorch"]


class InfeasibleBudget(PlannerError, ValueError):
    """The training step does not fit in the budget, whatever is recomputed."""

    def __init__(self, budget_bytes: int, minimum_bytes: int, bottleneck: str,
                 message: str | None = None,
                 alternatives: Mapping[tuple[str, ...], int] | None = None) -> None:
        self.budget_bytes = budget_bytes
        """The budget that was asked for."""
        self.minimum_bytes = minimum_bytes
        """The smallest budget that this planner can meet; planning with it succeeds."""
        self.bottleneck = bottleneck
        """What holds that much memory at the minimum, by module and op."""
        self.alternatives = dict(alternatives or {})
        """What to `allow`, to the smallest budget in bytes that a plan would then meet; only what
        is smaller than `minimum_bytes`."""
        super().__init__(message or (
            f"the training step does not fit in {budget_bytes:,} bytes: the smallest budget that "
            f"works is {minimum_bytes:,} bytes (budget={minimum_bytes}). {bottleneck}"))

    def with_alternatives(self, alternatives: Mapping[tuple[str, ...], int]) -> InfeasibleBudget:
        """The same refusal, which names them too."""
        words = "".join(f" With allow={allow!r}, {least:,} bytes would do."
                        for allow, least in alternatives.items())
        return InfeasibleBudget(self.budget_bytes, self.minimum_bytes, self.bottleneck,
                                f"{self}{words}", alternatives)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.budget_bytes, self.minimum_bytes, self.bottleneck, str(self),
                             self.alternatives))


class PlanFileError(PlannerError, ValueError):
    """The file is no plan, or not one that this version reads."""
