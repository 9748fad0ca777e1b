"""The result of `planner.memory`: the memory breakdown of a training loop, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

from planner.step.categories import CATEGORIES, MemoryByCategory, MemoryTimeline
from planner.step.loop_trace import LoopTrace, StepPhase, TrainingLoop
from planner.training_loop.breakdown import (
    Floor,
    LoopBreakdown,
    MemoryHolder,
    PhaseMemory,
    holders_at,
)

_HOLDERS = 20
"""Number of holders at the peak that `to_dict` lists."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change of the training loop that lowers its peak."""

    change: str
    """The change, in words."""
    peak_bytes: int
    """Peak of the loop with that change."""
    exact: bool
    """True if the changed loop was traced like the present one; else it is an estimate."""
    caveat: str = ""
    """Side effects of the change, for example on training results."""


@dataclass(frozen=True, slots=True)
class LoopTimeline(MemoryTimeline):
    """Bytes by category before any event of loading and two iterations, and after each."""

    phases: tuple[tuple[str, int, int, int], ...]
    """Phase, iteration (0 is loading), and the first and last row of that phase."""


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
    floor: Floor
    proposals: tuple[Proposal, ...]
    """Changes that lower the peak, the most effective first."""
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

    @property
    def timeline(self) -> LoopTimeline:
        """Memory by category over loading and two iterations."""
        return _timeline(self.trace)

    def save_snapshot(self, path: str | PathLike[str]) -> None:
        """Write the whole loop as a snapshot for https://pytorch.org/memory_viz and
        `torch.cuda._memory_viz`; an existing file is replaced.

        Raises `OSError` if the path cannot be written.
        """
        from planner.training_loop.snapshot import save_snapshot

        save_snapshot(self.trace, path)

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
            "floor": asdict(self.floor),
            "proposals": [asdict(proposal) for proposal in self.proposals],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from planner.reporters.memory_table import memory_report
        from planner.reporters.table import plain_text

        return plain_text(memory_report(self))


def _phase(phase: PhaseMemory) -> dict[str, Any]:
    return {"phase": phase.phase.value, "peak_bytes": phase.peak_bytes,
            "memory": dict(phase.memory)}


def _timeline(loop: LoopTrace) -> LoopTimeline:
    held = dict.fromkeys(CATEGORIES, 0)
    rows = [tuple(held.values())]
    for event in loop.trace.events:
        block = loop.trace.blocks[event if event >= 0 else ~event]
        held[block.category.value] += block.size_bytes if event >= 0 else -block.size_bytes
        rows.append(tuple(held.values()))
    return LoopTimeline(tuple(rows), tuple(
        (StepPhase(span.phase).value, span.iteration, span.start, span.stop)
        for span in loop.spans))
