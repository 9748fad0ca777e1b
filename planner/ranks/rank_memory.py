"""Report of the memory of one rank of a data-parallel run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from planner.arguments.parallel import DataParallel
from planner.step.categories import MemoryByCategory


@dataclass(frozen=True, slots=True, eq=False)
class RankCategories(MemoryByCategory):
    """Mapping from category to bytes, in a fixed order; the categories sum to the peak.  Parameters
    are whole ones or this rank's shards, and so are gradients, which may be views of buckets."""

    unsharded_parameters: int = 0
    """Parameters of units that are gathered at the peak."""
    communication: int = 0
    """Buckets separate from the gradients; buffers of all-gather and reduce-scatter."""


CATEGORIES = tuple(field.name for field in fields(RankCategories))
"""The categories of a rank's memory, in the order in which reports list them."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank; peaks include resident memory."""

    parallel: DataParallel
    peak_bytes: int
    memory: RankCategories
    """Bytes by category at the peak; sums to `peak_bytes`."""
    resident_bytes: int
    """Allocated between steps: parameters, buffers, inputs, optimizer state, DDP's buckets."""
    forward_backward_peak_bytes: int
    optimizer_step_peak_bytes: int
    """0 without an optimizer."""
    bucket_bytes: tuple[int, ...]
    """Sizes of DDP's buckets, in the order in which they are reduced."""
    units: tuple[tuple[str, int], ...]
    """Wrapped modules and the bytes of their whole parameters; the root, named "", last."""
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "kind": self.parallel.kind,
            "ranks": self.parallel.ranks,
            "peak_bytes": self.peak_bytes,
            "resident_bytes": self.resident_bytes,
            "forward_backward_peak_bytes": self.forward_backward_peak_bytes,
            "optimizer_step_peak_bytes": self.optimizer_step_peak_bytes,
            "memory": dict(self.memory),
            "bucket_bytes": list(self.bucket_bytes),
            "units": [{"module": name, "bytes": size} for name, size in self.units],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from planner.reporters.memory_table import rank_report
        from planner.reporters.table import plain_text

        return plain_text(rank_report(self))
