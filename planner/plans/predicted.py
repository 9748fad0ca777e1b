"""Predictions for a step: memory and time, with and without a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from planner.step.categories import MemoryByCategory

Change = Annotated[float, msgspec.Meta(gt=-1)]
"""A relative change, above -1."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted memory and time of one training step, with and without the plan."""

    peak_bytes: int
    """Predicted peak of the whole step under the plan."""
    baseline_peak_bytes: int
    """Predicted peak of the plain step: the eager model without a plan."""
    reserved_bytes: int | None
    """Predicted memory that torch's allocator reserves on the GPU under the plan, in its steady
    state: allocated memory, unused parts of segments, and the workspaces of cuBLAS.  The CUDA
    context and the buffers of NCCL are not included.  `None` without such an allocator (on a CPU)
    or if the blocks of the step are not known one by one (for Inductor)."""
    baseline_reserved_bytes: int | None
    """The same for the plain step."""
    resident_bytes: int
    """Allocated before the step begins: parameters, buffers, inputs, optimizer state."""
    forward_backward_peak_bytes: int
    """Predicted peak of forward, loss and backward, resident memory included."""
    optimizer_step_peak_bytes: int
    """Predicted peak of the optimizer's step, resident memory included; 0 without an optimizer."""
    memory: MemoryByCategory
    """Bytes at the peak by category; sums to `peak_bytes`."""
    overhead: Change
    """Estimated extra step time, as a fraction of the step without recomputation.  Below 0 if the
    kernels of a plan for Inductor were timed and are faster."""
    recompute_flops: int
    """FLOPs of recomputation in one step."""
    offloaded_bytes: int = field(default=0, kw_only=True)
    """Bytes stored on the host in one step and fetched back."""
    transfer_seconds: float = field(default=0.0, kw_only=True)
    """Estimated time of these copies, both ways together.  They overlap with the ops; time that ops
    wait for them is part of `overhead`."""
    step_flops: int
    """FLOPs of one step without recomputation."""
