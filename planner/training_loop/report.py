"""The result of `planner.memory`: the memory of a training loop, phase by phase and by category.

Reads a `planner.step.loop_trace.LoopTrace` of the plain eager step or of the step under a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from planner._graph_capture.memory.trace import Block, MemoryTrace
from planner._graph_capture.training_graph import Category
from planner.step.categories import MemoryByCategory
from planner.step.loop_trace import LoopTrace, StepPhase, TrainingLoop


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The peak of one phase of an iteration."""

    phase: StepPhase
    peak_bytes: int
    memory: MemoryByCategory
    """At the peak; sums to `peak_bytes`."""
    event: int
    """Number of events before the peak."""


@dataclass(frozen=True, slots=True)
class IterationMemory:
    """Peaks of one iteration, phase by phase; of several micro-batches the highest."""

    phases: tuple[PhaseMemory, ...]

    @property
    def fullest(self) -> PhaseMemory:
        """The phase with the highest peak, the first if several."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The maximum over the phases."""
        return self.fullest.peak_bytes

    def __getitem__(self, phase: StepPhase | str) -> PhaseMemory:
        """The phase of this name; raises `KeyError`."""
        for found in self.phases:
            if found.phase == phase:
                return found
        raise KeyError(phase)


@dataclass(frozen=True, slots=True)
class LoopBreakdown:
    """Memory of a whole training loop."""

    loading: PhaseMemory
    first: IterationMemory
    """The first iteration: the optimizer has not allocated its state yet."""
    steady: IterationMemory
    """Any later iteration."""
    resident: MemoryByCategory
    """Memory allocated between steps, from the second on."""

    @property
    def fullest(self) -> PhaseMemory:
        """The phase with the highest peak of all, the first if several."""
        return max((self.loading, *self.first.phases, *self.steady.phases),
                   key=lambda phase: phase.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The peak of the loop."""
        return self.fullest.peak_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated between steps."""
        return self.resident.total_bytes


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """Blocks of one kind that are alive at one event."""

    size_bytes: int
    category: str
    module: str
    """Qualified name; empty for none."""
    op: str
    """The op that allocated them; empty for blocks from before the step."""
    count: int
    """Number of blocks."""


def breakdown_of(loop: LoopTrace) -> LoopBreakdown:
    """The peaks of every phase, by category."""
    trace, levels = loop.trace, loop.trace.levels()
    fullest: dict[tuple[int, StepPhase], PhaseMemory] = {}
    for span in loop.spans:
        event = max(range(span.start, span.stop + 1), key=levels.__getitem__)
        known = fullest.get((span.iteration, span.phase))
        if known is None or levels[event] > known.peak_bytes:
            held = trace.by_category(trace.alive_after(event))
            fullest[span.iteration, span.phase] = PhaseMemory(
                span.phase, levels[event], _memory(held), event)

    def iteration(number: int) -> IterationMemory:
        return IterationMemory(tuple(phase for (when, _), phase in fullest.items()
                                     if when == number))

    left = trace.alive_after(loop.spans[-1].stop)
    return LoopBreakdown(
        loading=fullest[0, StepPhase.LOADING], first=iteration(1), steady=iteration(2),
        resident=_memory(trace.by_category(left)))


def holders_at(trace: MemoryTrace, event: int) -> tuple[MemoryHolder, ...]:
    """Tensors alive after `event` events, by category, module and op, largest first."""
    sizes: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    for number in trace.alive_after(event):
        block = trace.blocks[number]
        if block.size_bytes:
            key = (block.category.value, _place(block), block.op)
            sizes[key] += block.size_bytes
            counts[key] += 1
    found = [MemoryHolder(size, *key, counts[key]) for key, size in sizes.items()]
    return tuple(sorted(found, key=lambda h: (-h.size_bytes, h.category, h.module, h.op)))


def _place(block: Block) -> str:
    """The module of a block: the one that allocated it, or the owner of a named tensor."""
    return block.module or block.label.rpartition(".")[0]


def _memory(held: Mapping[Category, int]) -> MemoryByCategory:
    return MemoryByCategory(**{category.value: size for category, size in held.items()})


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
            "loading": _as_json(self.loading),
            "first_step": [_as_json(phase) for phase in self.first.phases],
            "later_steps": [_as_json(phase) for phase in self.steady.phases],
            "holders": [asdict(holder) for holder in self.holders[:_HOLDERS]],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from planner.reporters.memory_table import memory_report
        from planner.reporters.table import plain_text

        return plain_text(memory_report(self))


def _as_json(phase: PhaseMemory) -> dict[str, Any]:
    return {"phase": phase.phase.value, "peak_bytes": phase.peak_bytes,
            "memory": dict(phase.memory)}
