"""Count the steps of a model that ran under its plan, and the reasons why others did not.

A step is a call of the model with gradients enabled.  The first step that does not run under the
plan for some reason warns of it; later ones with that reason are only counted.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepCounts:
    """Counts of the steps of one model."""

    planned: int = 0
    """Steps that ran under a plan."""
    unplanned: int = 0
    """Steps that ran unchanged."""
    last_reason: str | None = None
    """Reason why the last unplanned step did not run under the plan; `None`: there was none."""
    _warned: set[str] = field(default_factory=set, repr=False)

    def count(self, reason: str | None) -> None:
        """Count a step; `reason`: why it did not run under the plan, `None` if it did."""
        if reason is None:
            self.planned += 1
            return
        self.unplanned += 1
        self.last_reason = reason
        self.warn(reason)

    def warn(self, words: str) -> None:
        """Warn, once."""
        if words not in self._warned:
            self._warned.add(words)
            warnings.warn(words, stacklevel=3)


def reason_of_mode(planned_training: bool) -> str:
    """Return the reason why a step in the other mode than the plan's runs without it."""
    planned, now = ("train", "eval") if planned_training else ("eval", "train")
    return f"the plan was made in {planned} mode; this step in {now} mode runs without it"
