"""What holds how much memory at one moment of a training step, and when it is fullest.

Forward, loss and backward are unrolled by `solvers.simulator`; what is resident, and the
optimizer's step, are those of `planner.step.budget`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from graph_capture.training_graph import BufferKind, TrainingGraph
from planner.step.budget import StepAccount
from planner.step.form import Form
from planner.units import format_bytes
from solvers.simulator import Timeline


class Holder(NamedTuple):
    """What one op, or a kind of memory, holds at one position of the step."""

    size_bytes: int
    what: str


def account(form: Form, timeline: Timeline) -> StepAccount:
    """The memory of the step whose forward and backward run as `timeline` says."""
    return form.budget.account(
        timeline.peak_bytes, memory_at(form.graph, timeline, timeline.peak_position))


def memory_at(graph: TrainingGraph, timeline: Timeline, position: int) -> dict[str, int]:
    """Category to bytes at one position of forward, loss and backward, without resident memory.

    Sums to `timeline.memory_bytes[position]`.
    """
    alive: Counter[str] = Counter()
    for category, _, size_bytes in _alive_at(graph, timeline, position):
        alive[category] += size_bytes
    return dict(alive)


def holders_at(graph: TrainingGraph, timeline: Timeline, position: int) -> list[Holder]:
    """What is alive at one position of forward, loss and backward, by op, largest first."""
    held: Counter[str] = Counter()
    for _, what, size_bytes in _alive_at(graph, timeline, position):
        held[what] += size_bytes
    return sorted((Holder(size, what) for what, size in held.items() if size),
                  key=lambda holder: (-holder.size_bytes, holder.what))


def describe_bottleneck(form: Form, timeline: Timeline, *, top: int = 5) -> str:
    """In words: when the step of `timeline` is fullest, and what holds the memory then."""
    graph, budget, optimizer = form.graph, form.budget, form.budget.optimizer
    resident = ", ".join(f"{name} {format_bytes(size)}" for name, size in budget.resident.items()
                         if size and name != "gradients")
    earlier_bytes = budget.resident.gradients
    if earlier_bytes:
        resident += f", gradients of earlier micro-steps {format_bytes(earlier_bytes)}"
    always = f"{format_bytes(budget.resident_bytes)} resident ({resident})" if resident else (
        "no resident memory")
    if optimizer and budget.optimizer_step_bytes > budget.resident_bytes + timeline.peak_bytes:
        memory = budget.optimizer_step
        return (f"At that minimum the step of {optimizer.name} is the fullest moment: {always}, "
                f"gradients {format_bytes(memory.gradients)}, the model's outputs "
                f"{format_bytes(memory.activations)}, temporaries of the optimizer's step "
                f"{format_bytes(memory.temporaries)}.")
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


def _alive_at(graph: TrainingGraph, timeline: Timeline, position: int
              ) -> Iterator[tuple[str, str, int]]:
    """Category, description and bytes of all that is alive at one position."""
    taken = timeline.inplace_of[position]
    for instance in timeline.instances:
        is_taken = instance.storage == taken and instance.death == position
        # A buffer that the output took over counts once, as the output.
        if instance.birth <= position <= instance.death and not is_taken:
            buffer = graph.buffers[instance.storage]
            is_gradient = buffer.kind is BufferKind.GRADIENT and buffer.label
            yield (buffer.kind.value, f"gradient of {buffer.label}" if is_gradient
                   else graph.ops[buffer.producer].name, buffer.size_bytes)
    running = graph.ops[timeline.schedule[position]]
    yield "temporaries", f"workspace of {running.name}", running.workspace_bytes
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for when, index in enumerate(timeline.schedule):
        if graph.ops[index].replay_state_bytes:
            first.setdefault(index, when)
            last[index] = when
    for index, begin in first.items():
        if begin < last[index] and begin <= position <= last[index]:
            op = graph.ops[index]  # held so that it can repeat
            yield ("activations", f"random state or input copy for replaying {op.name}",
                   op.replay_state_bytes)
