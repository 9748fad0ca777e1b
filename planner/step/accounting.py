"""The account of a whole training step: what holds how much memory when it is fullest.

The model of the world: resident memory (parameters, buffers, inputs, optimizer state) is there from
before the step to after it.  Above it the step has two phases: forward, loss and backward, unrolled
by `solvers.simulator`; then the optimizer's step, during which all that is kept to the end of the
first phase (gradients, the model's output) is alive, and its own temporaries.  The peak is the
maximum over both.  Gradients of earlier micro-steps are resident until the new ones are added to
them, which is after the backward.

Blind spots: the first step, when optimizer state does not exist yet, is taken for any other;
fragmentation and the allocator's caches do not count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import NamedTuple

from graph_capture.training_graph import BufferKind, OptimizerMemory, TrainingGraph
from planner.step.categories import ByCategory
from planner.units import format_bytes
from solvers.simulator import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class MemoryByCategory(ByCategory):
    """A mapping from category to bytes, in a fixed order; the categories sum to the peak."""

    parameters: int = 0
    buffers: int = 0
    inputs: int = 0
    gradients: int = 0
    optimizer: int = 0
    """State of the optimizer; the temporaries of its step are temporaries."""
    activations: int = 0
    """Made by the forward, with what their recomputation needs (the random generator's state)."""
    temporaries: int = 0
    """Gradients of activations, workspace of single ops, temporaries of the optimizer's step."""

    @property
    def total_bytes(self) -> int:
        """The sum over all categories."""
        return sum(self.values())


CATEGORIES = tuple(field.name for field in fields(MemoryByCategory))
"""The categories of memory, in the order in which reports list them."""


@dataclass(frozen=True, slots=True)
class StepAccount:
    """Memory of one training step under one schedule."""

    peak_bytes: int
    memory: MemoryByCategory
    """At the peak; sums to `peak_bytes`."""
    resident_bytes: int
    """Held before the step begins: parameters, buffers, inputs, optimizer state, gradients of
    earlier micro-steps."""
    forward_backward_peak_bytes: int
    """Peak of forward, loss and backward, resident memory included."""
    optimizer_step_peak_bytes: int
    """Peak of the optimizer's step, resident memory included; 0 without an optimizer."""


class Holder(NamedTuple):
    """What one op, or a kind of memory, holds at one position of the step."""

    size_bytes: int
    what: str


def account(graph: TrainingGraph, timeline: Timeline,
            optimizer: OptimizerMemory | None) -> StepAccount:
    """The memory of the step whose forward and backward run as `timeline` says."""
    resident = _resident(graph, optimizer)
    resident_bytes = sum(resident.values())
    forward_backward = resident_bytes + timeline.peak_bytes
    optimizer_step = optimizer_step_bytes(graph, optimizer)
    if optimizer_step > forward_backward:
        assert optimizer is not None
        alive = Counter(resident)
        alive["gradients"] -= graph.resident.gradients_bytes  # the new ones were added to them
        for buffer in graph.buffers:
            if buffer.kept_to_end:
                alive[buffer.kind.value] += buffer.size_bytes
        alive["temporaries"] += optimizer.step_peak_bytes
    else:
        alive = Counter(resident)
        alive.update(memory_at(graph, timeline, timeline.peak_position))
    memory = MemoryByCategory(**alive)
    peak_bytes = max(forward_backward, optimizer_step)
    assert memory.total_bytes == peak_bytes, "the categories must account for every byte"
    return StepAccount(peak_bytes, memory, resident_bytes, forward_backward, optimizer_step)


def resident_bytes(graph: TrainingGraph, optimizer: OptimizerMemory | None) -> int:
    """What is held before the step begins and throughout it."""
    return sum(_resident(graph, optimizer).values())


def optimizer_step_bytes(graph: TrainingGraph, optimizer: OptimizerMemory | None) -> int:
    """Peak of the optimizer's step, resident memory included; 0 without an optimizer.

    No schedule of forward and backward changes it.
    """
    if optimizer is None:
        return 0
    kept = sum(buffer.size_bytes for buffer in graph.buffers if buffer.kept_to_end)
    return (resident_bytes(graph, optimizer) - graph.resident.gradients_bytes + kept
            + optimizer.step_peak_bytes)


def memory_at(graph: TrainingGraph, timeline: Timeline, position: int) -> dict[str, int]:
    """Category to bytes at one position of forward, loss and backward, without resident memory.

    Sums to `timeline.memory_bytes[position]`.
    """
    alive: Counter[str] = Counter()
    for instance in timeline.instances:
        if instance.birth <= position <= instance.death:
            buffer = graph.buffers[instance.storage]
            alive[buffer.kind.value] += buffer.size_bytes
    taken = timeline.inplace_of[position]
    if taken is not None:  # the output took over this buffer: the two count once
        alive[graph.buffers[taken].kind.value] -= graph.buffers[taken].size_bytes
    alive["temporaries"] += graph.ops[timeline.schedule[position]].workspace_bytes
    alive["activations"] += sum(size for _, size in _replay_states_at(graph, timeline, position))
    return dict(alive)


def holders_at(graph: TrainingGraph, timeline: Timeline, position: int) -> list[Holder]:
    """What is alive at one position of forward, loss and backward, by op, largest first."""
    taken = timeline.inplace_of[position]
    held: Counter[str] = Counter()
    for instance in timeline.instances:
        if not instance.birth <= position <= instance.death:
            continue
        buffer = graph.buffers[instance.storage]
        if instance.storage == taken and instance.death == position:
            continue
        maker = graph.ops[buffer.producer].name
        held[f"gradient of {buffer.label}" if buffer.kind is BufferKind.GRADIENT and buffer.label
             else maker] += buffer.size_bytes
    running = graph.ops[timeline.schedule[position]]
    if running.workspace_bytes:
        held[f"workspace of {running.name}"] += running.workspace_bytes
    for index, size_bytes in _replay_states_at(graph, timeline, position):
        held[f"random state or input copy for replaying {graph.ops[index].name}"] += size_bytes
    return sorted((Holder(size, what) for what, size in held.items() if size),
                  key=lambda holder: (-holder.size_bytes, holder.what))


def describe_bottleneck(graph: TrainingGraph, timeline: Timeline,
                        optimizer: OptimizerMemory | None, *, top: int = 5) -> str:
    """In words: when the step of `timeline` is fullest, and what holds the memory then."""
    step = account(graph, timeline, optimizer)
    resident = ", ".join(f"{name} {format_bytes(step.memory[name])}"
                         for name in ("parameters", "buffers", "inputs", "optimizer")
                         if step.memory[name])
    earlier_bytes = graph.resident.gradients_bytes
    if earlier_bytes:
        resident += f", gradients of earlier micro-steps {format_bytes(earlier_bytes)}"
    always = f"{format_bytes(step.resident_bytes)} resident ({resident})" if resident else (
        "no resident memory")
    if optimizer is not None and step.optimizer_step_peak_bytes > step.forward_backward_peak_bytes:
        return (f"At that minimum the step of {optimizer.name} is the fullest moment: {always}, "
                f"gradients {format_bytes(step.memory['gradients'])}, the model's outputs "
                f"{format_bytes(step.memory['activations'])}, temporaries of the optimizer's step "
                f"{format_bytes(step.memory['temporaries'])}.")
    position = timeline.peak_position
    running = graph.ops[timeline.schedule[position]]
    holders = holders_at(graph, timeline, position)
    lines = [f"{format_bytes(holder.size_bytes)} {holder.what}" for holder in holders[:top]]
    rest = sum(holder.size_bytes for holder in holders[top:])
    if rest:
        lines.append(f"{format_bytes(rest)} in {len(holders) - top} others")
    where = f" ({running.source})" if running.source else ""
    return (f"At that minimum memory is fullest while {running.name}{where} runs: {always}, and "
            f"{'; '.join(lines)}.")


def _resident(graph: TrainingGraph, optimizer: OptimizerMemory | None) -> dict[str, int]:
    resident = graph.resident
    return {
        "parameters": resident.parameters_bytes,
        "buffers": resident.buffers_bytes,
        "inputs": resident.inputs_bytes,
        "gradients": resident.gradients_bytes,
        "optimizer": 0 if optimizer is None else optimizer.state_bytes,
    }


def _replay_states_at(graph: TrainingGraph, timeline: Timeline,
                      position: int) -> list[tuple[int, int]]:
    """Ops between their first and their last run, and the bytes held so that they can repeat."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for when, index in enumerate(timeline.schedule):
        if graph.ops[index].replay_state_bytes:
            first.setdefault(index, when)
            last[index] = when
    return [(index, graph.ops[index].replay_state_bytes) for index in first
            if first[index] < last[index] and first[index] <= position <= last[index]]
