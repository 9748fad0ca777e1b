"""The memory in which single ops may be run to be measured: what the device has free right now, and
what a budget leaves once a training loop has begun.

The model of the world: the current memory and the dummy inputs of one op together must stay within
the budget of the step.  A budget that is a share of the plain step's peak is computed without the
workspace of its ops, which is still unknown, so it is never too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class ProbeHeadroom:
    """Memory that a budget leaves to dummy inputs."""

    limit: int | Fraction
    """Bytes, or a share of the plain step's peak."""
    held_bytes: Callable[[], int]
    """Bytes currently allocated on the device."""
    resident_bytes: int
    """Bytes that stay allocated before a step begins: parameters, buffers and inputs."""
    plain_peak_bytes: int | None = None
    """Peak of the plain step above the resident memory, if it is known."""

    def left(self, plain_peak: Callable[[], int]) -> Callable[[], int]:
        """A function that returns the bytes left; `plain_peak`: the peak of the plain step above
        the resident memory, called only if needed."""
        limit = self.limit if isinstance(self.limit, int) else math.floor(
            self.limit * (self.resident_bytes + (
                plain_peak() if self.plain_peak_bytes is None else self.plain_peak_bytes)))
        return lambda: max(0, limit - self.held_bytes())


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` without evicting anything; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        limits = [limit for limit in (_available_bytes(), _left_in_control_group_bytes())
                  if limit is not None]
        return min(limits, default=0)
    return 0


def _available_bytes() -> int | None:
    """Available memory as Linux reports it; elsewhere a cautious constant."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 2**31


def _left_in_control_group_bytes() -> int | None:
    """Memory that the container's limit leaves; `None` if there is no limit."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None
