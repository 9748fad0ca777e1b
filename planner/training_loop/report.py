"""The result of `planner.memory`: the memory breakdown of a training loop, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from planner.step.categories import MemoryByCategory
from planner.step.loop_trace import LoopTrace, TrainingLoop
from planner.training_loop.breakdown import LoopBreakdown, MemoryHolder, PhaseMemory, holders_at

_HOLDERS = 20
"""Number of holders at the peak that `to_dict` lists."""


@dataclass(frozen=True, slots=True)
class MemoryReport(LoopBreakdown):
    """Memory of a whole training loop, by phase, category, module and op."""

    trace: LoopTrace = field(repr=False)
    """Every block of loading and of two iterations, in order."""
    loop: TrainingLoop
    device: str
    """The device of the loop."""
    optimizer: str | None
    """Name of its class; `None`: no optimizer is counted."""
    planned: bool
    """True if forward and backward are those of a plan."""
    inference_peak_bytes: int
    """Peak of a forward in `eval()` mode without gradients, parameters and inputs included."""
    notes: tuple[str, ...]
    reserved_bytes: int | None = None
    """Predicted bytes that torch's allocator reserves on a GPU for the loop, including the
    workspaces of cuBLAS; `None` on a CPU, whose allocator reserves no more than is allocated."""

    @property
    def breakdown(self) -> LoopBreakdown:
        """The memory breakdown without the other fields."""
        return LoopBreakdown(self.loading, self.first, self.steady, self.resident)

    @property
    def memory(self) -> MemoryByCategory:
        """Bytes at the peak by category; sums to `peak_bytes`."""
        return self.fullest.memory

    @property
    def holders(self) -> tuple[MemoryHolder, ...]:
        """Tensors alive at the peak, by category, module and op, largest first."""
        return holders_at(self.trace.trace, self.fullest.event)

    def to_dict(self) -> dict[str, Any]:
        """The breakdown as JSON values; sizes are bytes."""
        return {
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.fullest.phase.value,
            "reserved_bytes": self.reserved_bytes,
            "resident_bytes": self.resident_bytes,
            "inference_peak_bytes": self.inference_peak_bytes,
            "device": self.device,
            "optimizer": self.optimizer,
            "planned": self.planned,
            "accumulation": self.loop.accumulation,
            "set_to_none": self.loop.set_to_none,
            "zero_grad": self.loop.zero_grad,
            "hold_output": self.loop.hold_output,
            "memory": dict(self.memory),
            "resident": dict(self.resident),
            "loading": _phase(self.loading),
            "first_step": [_phase(phase) for phase in self.first.phases],
            "later_steps": [_phase(phase) for phase in self.steady.phases],
            "holders": [asdict(holder) for holder in self.holders[:_HOLDERS]],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from planner.reporters.memory_table import memory_report
        from planner.reporters.table import plain_text

        return plain_text(memory_report(self))


def _phase(phase: PhaseMemory) -> dict[str, Any]:
    return {"phase": phase.phase.value, "peak_bytes": phase.peak_bytes,
            "memory": dict(phase.memory)}
