"""The limit on a whole step, and the part of it that remains for forward and backward.

Model of the world: resident memory (parameters, buffers, inputs, optimizer state) is allocated
throughout the step.  Above it the step has two phases: forward, loss and backward, which a schedule
orders; then the optimizer's step, with everything that is kept to the end of the first phase
(gradients, the model's output) and its own temporaries.  The peak is the maximum over both, and no
schedule changes the second.  Gradients of earlier micro-batches are resident until the new ones are
added to them, after the backward; so is memory that other calls of the step have saved for their
backward.

Bytes are of the whole step, except where the name says *net*: above resident memory, during
forward, loss and backward, as the solvers count.

Blind spots: the first step, when optimizer state does not exist yet, is treated like any other;
fragmentation and the allocator's caches do not count (see `planner.step.reserved`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner._graph_capture.training_graph import OptimizerMemory, TrainingGraph
from planner.step.categories import MemoryByCategory


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Memory of one training step under one schedule."""

    memory: MemoryByCategory
    """Memory at the peak of the whole step; sums to it."""
    forward_backward_peak_bytes: int
    """Peak of forward, loss and backward, resident memory included."""

    @property
    def peak_bytes(self) -> int:
        """Peak of the whole step."""
        return self.memory.total_bytes


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The memory of a step that no schedule changes, and conversions between its limit and net
    bytes."""

    optimizer: OptimizerMemory | None
    resident: MemoryByCategory
    """Allocated before the step begins and throughout it."""
    optimizer_step: MemoryByCategory
    """Memory at the peak of the optimizer's step; empty without an optimizer."""

    @classmethod
    def of(cls, graph: TrainingGraph, optimizer: OptimizerMemory | None) -> StepBudget:
        """The budget of the step with this graph and this optimizer."""
        held = graph.resident
        resident = MemoryByCategory(
            held.parameters_bytes, held.buffers_bytes, held.inputs_bytes, held.gradients_bytes,
            0 if optimizer is None else optimizer.state_bytes, held.pending_bytes)
        if optimizer is None:
            return cls(None, resident, MemoryByCategory())
        made = Counter({"temporaries": optimizer.step_peak_bytes})
        for buffer in graph.buffers:
            if buffer.kept_to_end:
                made[buffer.kind.value] += buffer.size_bytes
        # The new gradients were added to those of earlier micro-batches.
        return cls(optimizer, resident, _plus(replace(resident, gradients=0, activations=0), made))

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated before the step begins and throughout it."""
        return self.resident.total_bytes

    @property
    def optimizer_step_bytes(self) -> int:
        """Peak of the optimizer's step, resident memory included; 0 without an optimizer."""
        return self.optimizer_step.total_bytes

    @property
    def least_net_bytes(self) -> int:
        """The net bytes at which forward and backward peak as high as the optimizer's step: no plan
        needs less."""
        return max(0, self.net_bytes(self.optimizer_step_bytes))

    def is_possible(self, limit_bytes: int) -> bool:
        """True if the limit exceeds resident memory and the optimizer's step."""
        return self.net_bytes(limit_bytes) >= 0 and self.optimizer_step_bytes <= limit_bytes

    def net_bytes(self, limit_bytes: int) -> int:
        """The part of a limit that remains for forward and backward; negative if resident memory
        exceeds the limit."""
        return limit_bytes - self.resident_bytes

    def whole_bytes(self, net_bytes: int) -> int:
        """Peak of the whole step whose forward and backward peak at `net_bytes`."""
        return max(self.resident_bytes + net_bytes, self.optimizer_step_bytes)

    def with_resident(self, made: Mapping[str, int]) -> MemoryByCategory:
        """Resident memory plus the bytes `made` by forward and backward, by category."""
        return _plus(self.resident, made)

    def breakdown(self, net_peak_bytes: int, made: Mapping[str, int]) -> StepBreakdown:
        """The breakdown of a step whose forward and backward peak at `net_peak_bytes`; `made`:
        their bytes by category at that peak."""
        forward_backward, floor = self.resident_bytes + net_peak_bytes, self.optimizer_step_bytes
        memory = self.optimizer_step if floor > forward_backward else self.with_resident(made)
        assert memory.total_bytes == max(forward_backward, floor), "every byte has a category"
        return StepBreakdown(memory, forward_backward)


def _plus(memory: MemoryByCategory, made: Mapping[str, int]) -> MemoryByCategory:
    return MemoryByCategory(**{name: size + made.get(name, 0) for name, size in memory.items()})
