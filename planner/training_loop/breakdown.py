"""Memory breakdown of the whole training loop: the peak of each phase, by category.

Reads a `planner.step.loop_trace.LoopTrace` of the plain eager step or of the step under a plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from planner._graph_capture.memory.trace import Block, Category, MemoryTrace
from planner.step.categories import MemoryByCategory
from planner.step.loop_trace import LoopTrace, Span, StepPhase


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The peak of one phase of an iteration."""

    phase: StepPhase
    peak_bytes: int
    memory: MemoryByCategory
    """At the peak; sums to `peak_bytes`."""
    event: int
    """Number of events before the peak."""
    micro_batch: int
    """Index of the traced micro-batch with the peak, from 0."""


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


@dataclass(frozen=True, slots=True)
class Floor:
    """Memory that no recomputation lowers."""

    size_bytes: int
    """Memory alive during the op with the largest working set."""
    phase: StepPhase
    module: str
    op: str
    working_set_bytes: int
    """The op's part of these bytes: activations, gradients of activations and workspace that it
    reads, writes and uses."""

    @property
    def is_of_optimizer(self) -> bool:
        """True if the floor is the peak of the optimizer's step."""
        return self.phase is StepPhase.OPTIMIZER_STEP


def breakdown_of(loop: LoopTrace) -> LoopBreakdown:
    """The peaks of every phase, by category."""
    phases = _phases(loop)
    fullest: dict[tuple[int, StepPhase], PhaseMemory] = {}
    for span, phase in zip(loop.spans, phases, strict=True):
        known = fullest.get((span.iteration, span.phase))
        if known is None or phase.peak_bytes > known.peak_bytes:
            fullest[span.iteration, span.phase] = phase

    def iteration(number: int) -> IterationMemory:
        return IterationMemory(tuple(phase for (when, _), phase in fullest.items()
                                     if when == number))

    left = loop.trace.alive_after(loop.spans[-1].stop)
    return LoopBreakdown(
        loading=fullest[0, StepPhase.LOADING], first=iteration(1), steady=iteration(2),
        resident=_by_category(loop.trace, left))


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


def floor_of(loop: LoopTrace) -> Floor:
    """Lower bound on the peak under any recomputation of activations, with the kernels that ran.

    Each run of an op needs its own tensors (an operand that its result can overwrite counts once
    with it), and all memory other than activations and their gradients: parameters, gradients of
    parameters, state, and the whole optimizer step.
    """
    trace = loop.trace
    best = Floor(0, StepPhase.LOADING, "", "", 0)
    fixed = 0  # bytes alive that no recomputation can release
    alive: set[int] = set()
    runs = sorted(trace.runs, key=lambda run: run.event)
    following = 0
    for span in loop.spans:
        optimizing = span.phase is StepPhase.OPTIMIZER_STEP
        for position in range(span.start, span.stop):
            while following < len(runs) and runs[following].event <= position:
                run = runs[following]
                following += 1
                own = sum(trace.blocks[block].size_bytes for block in run.touched
                          if not (block in alive and _is_fixed(trace.blocks[block]))
                          ) - run.spared_bytes
                if not optimizing and fixed + own > best.size_bytes:
                    best = Floor(fixed + own, span.phase, run.module, run.op, own)
            event = trace.events[position]
            block = trace.blocks[event if event >= 0 else ~event]
            if _is_fixed(block):
                fixed += block.size_bytes if event >= 0 else -block.size_bytes
                (alive.add if event >= 0 else alive.discard)(event if event >= 0 else ~event)
    breakdown = breakdown_of(loop)
    for iteration in (breakdown.first, breakdown.steady):
        for phase in iteration.phases:
            if phase.phase is StepPhase.OPTIMIZER_STEP and phase.peak_bytes > best.size_bytes:
                best = Floor(phase.peak_bytes, phase.phase, "", "", 0)
    return best


def _is_fixed(block: Block) -> bool:
    return block.category not in (Category.ACTIVATIONS, Category.TEMPORARIES)


def _place(block: Block) -> str:
    """The module of a block: the one that allocated it, or the owner of a named tensor."""
    return block.module or block.label.rpartition(".")[0]


def _phases(loop: LoopTrace) -> list[PhaseMemory]:
    trace = loop.trace
    held = Counter(dict.fromkeys(Category, 0))
    level = 0
    found = []
    for span in loop.spans:
        best, where, at_best = level, span.start, dict(held)
        for position in range(span.start, span.stop):
            event = trace.events[position]
            block = trace.blocks[event if event >= 0 else ~event]
            change = block.size_bytes if event >= 0 else -block.size_bytes
            held[block.category] += change
            level += change
            if level > best:
                best, where, at_best = level, position + 1, dict(held)
        found.append(_phase(span, best, where, at_best))
    return found


def _phase(span: Span, peak_bytes: int, event: int, held: dict[Category, int]) -> PhaseMemory:
    return PhaseMemory(span.phase, peak_bytes, _memory(held), event, span.micro_batch)


def _memory(held: dict[Category, int]) -> MemoryByCategory:
    return MemoryByCategory(**{category.value: size for category, size in held.items()})


def _by_category(trace: MemoryTrace, blocks: list[int]) -> MemoryByCategory:
    return _memory(dict(trace.by_category(blocks)))
