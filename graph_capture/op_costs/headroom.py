"""The memory that the probe of single ops may use once a training loop has begun.

The model of the world: the current memory and the dummy inputs of one op together must stay within
the budget of the step.  A budget that is a share of the plain step's peak is computed without the
workspace of its ops, which is still unknown, so it is never too large.
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
    """Bytes currently allocated on the device."""
    resident_bytes: int
    """Bytes that stay allocated before a step begins: parameters, buffers and inputs."""

    def left(self, plain_peak: Callable[[], int]) -> Callable[[], int]:
        """A function that returns the bytes left; `plain_peak`: the peak of the plain step above
        the resident memory, called only if needed."""
        limit = self.limit if isinstance(self.limit, int) else math.floor(
            self.limit * (self.resident_bytes + plain_peak()))
        return lambda: max(0, limit - self.held_bytes())
