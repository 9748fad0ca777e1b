"""What is predicted of a step: memory and time, under a plan and without."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from planner.step.categories import MemoryByCategory

Change = Annotated[float, msgspec.Meta(gt=-1)]
"""A difference as a fraction of what it is a difference to, which is not lost as a whole."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What one training step takes under a plan, and what it takes without."""

    peak_bytes: int
    """Predicted peak of the whole step under the plan."""
    baseline_peak_bytes: int
    """Predicted peak of the step as it runs today: the plain eager model, no plan."""
    reserved_bytes: int | None
    """What torch's allocator is predicted to reserve on the GPU under the plan, once it reserves no
    more: what is allocated, what is left of segments, and the workspaces of cuBLAS.  The context of
    CUDA and the buffers of NCCL stand outside of it.  `None` where no such allocator is at work (on
    a CPU) or the blocks of the step are not known one by one (for Inductor)."""
    baseline_reserved_bytes: int | None
    """The same for the step as it runs today."""
    resident_bytes: int
    """Held before the step begins: parameters, buffers, inputs, optimizer state."""
    forward_backward_peak_bytes: int
    """Predicted peak of forward, loss and backward, resident memory included."""
    optimizer_step_peak_bytes: int
    """Predicted peak of the optimizer's step, resident memory included; 0 without an optimizer."""
    memory: MemoryByCategory
    """Bytes at the peak by category; sums to `peak_bytes`."""
    overhead: Change
    """Estimated extra step time, as a fraction of the step without recomputation.  Below 0 where
    the kernels of a plan for Inductor were timed and are the faster ones."""
    recompute_flops: int
    """FLOPs that the plan computes again in one step."""
    offloaded_bytes: int = field(default=0, kw_only=True)
    """What is stored on the host in one step and fetched back."""
    transfer_seconds: float = field(default=0.0, kw_only=True)
    """Estimated time of these copies, both ways together.  It runs beside the ops; what they wait
    for is part of `overhead`."""
    step_flops: int
    """FLOPs of one step without recomputation."""
