"""How much the probe of single ops may take where a training loop has begun.

The model of the world: what is held now and the dummy inputs of one op, together, are to stay
within the budget of the step.  A share of the plain step's peak is reckoned without the workspace
of its ops, which nobody knows yet, so it is no more than what will be meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class ProbeHeadroom:
    """Memory that a budget leaves to dummy inputs."""

    limit: int | Fraction
    """Bytes, or a share of the plain step's peak."""
    held_bytes: Callable[[], int]
    """Bytes allocated on the device at the moment."""
    resident_bytes: int
    """Of that, what is held before a step begins: parameters, buffers and inputs."""

    def left(self, plain_peak: Callable[[], int]) -> Callable[[], int]:
        """A function that says how many bytes are left; `plain_peak`: that of the plain step, above
        what is resident, asked for where it is needed."""
        limit = self.limit if isinstance(self.limit, int) else math.floor(
            self.limit * (self.resident_bytes + plain_peak()))
        return lambda: max(0, limit - self.held_bytes())
