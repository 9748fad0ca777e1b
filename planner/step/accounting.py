"""What holds how much memory at one moment of a training step, and when it is fullest.

Forward, loss and backward are unrolled by `solvers.simulator`; what is resident, and the
optimizer's step, are those of `planner.step.budget`.
"""

from __future__ import annotations

from collections import Counter
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
