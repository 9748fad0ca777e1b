"""Memory breakdown of a training step at one position, and at its peak.

Forward, loss and backward are unrolled by `solvers.simulator`; resident memory and the optimizer's
step come from `planner.step.budget`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from planner._graph_capture.training_graph import (
    MADE_BY_STEP,
    Category,
    Phase,
    TrainingGraph,
    TrainingOp,
)
from planner.solvers.simulator import Timeline
from planner.step.budget import StepBreakdown
from planner.step.variant import Variant
from planner.units import format_bytes


def breakdown(variant: Variant, timeline: Timeline) -> StepBreakdown:
    """The memory breakdown of the step whose forward and backward run as in `timeline`."""
    return variant.budget.breakdown(timeline.peak_bytes, {
        kind: row[timeline.peak_position]
        for kind, row in memory_over(variant.graph, timeline).items()})


def memory_over(graph: TrainingGraph, timeline: Timeline) -> dict[Category, list[int]]:
    """Bytes by kind at every position of forward, loss and backward, without resident memory.

    They sum to `timeline.memory_bytes`.
    """
    buffers = graph.buffers
    changes = {kind: [0] * (len(timeline.schedule) + 1) for kind in MADE_BY_STEP}

    def hold(kind: Category, first: int, last: int, size_bytes: int) -> None:
        changes[kind][first] += size_bytes
        changes[kind][last + 1] -= size_bytes

    for instance in timeline.instances:
        buffer = buffers[instance.storage]
        hold(buffer.kind, instance.birth, instance.death, buffer.size_bytes)
    for op, first, last in _replay_states(graph, timeline):
        hold(Category.ACTIVATIONS, first, last, op.replay_state_bytes)
    for position, index in timeline.runs:
        taken = timeline.inplace_of[position]
        hold(Category.TEMPORARIES, position, position, graph.ops[index].workspace_bytes)
        if taken is not None:  # A buffer that the output reuses counts once, as the output.
            hold(buffers[taken].kind, position, position, -buffers[taken].size_bytes)
    return {kind: list(accumulate(row[:-1])) for kind, row in changes.items()}


def backward_begins(graph: TrainingGraph, timeline: Timeline) -> int:
    """Position of the first run of an op of the backward."""
    return next((position for position, index in timeline.runs
                 if graph.ops[index].phase is Phase.BACKWARD), len(timeline.schedule))


def holders_at(graph: TrainingGraph, timeline: Timeline, position: int) -> list[tuple[str, int]]:
    """Memory alive at one position of forward, loss and backward, by op or kind, largest first."""
    held: Counter[str] = Counter()
    taken = timeline.inplace_of[position]
    for instance in timeline.instances:
        is_taken = instance.storage == taken and instance.death == position
        # A buffer that the output reuses counts once, as the output.
        if instance.birth <= position <= instance.death and not is_taken:
            buffer = graph.buffers[instance.storage]
            is_gradient = buffer.kind is Category.GRADIENTS and buffer.label
            held[f"gradient of {buffer.label}" if is_gradient
                 else graph.ops[buffer.producer].name] += buffer.size_bytes
    if isinstance(index := timeline.schedule[position], int):
        running = graph.ops[index]
        held[f"workspace of {running.name}"] += running.workspace_bytes
    for op, first, last in _replay_states(graph, timeline):
        if first <= position <= last:
            held[f"random state or input copy for replaying {op.name}"] += op.replay_state_bytes
    return sorted(((what, size) for what, size in held.items() if size),
                  key=lambda holder: (-holder[1], holder[0]))


_HOLDERS_SHOWN = 5


def describe_bottleneck(variant: Variant, timeline: Timeline) -> str:
    """Describe the peak of the step of `timeline` and the memory alive there, in words."""
    graph, budget, optimizer = variant.graph, variant.budget, variant.budget.optimizer
    resident = ", ".join(f"{name} {format_bytes(size)}" for name, size in budget.resident.items()
                         if size and name != "gradients")
    earlier_bytes = budget.resident.gradients
    if earlier_bytes:
        resident += f", gradients of earlier micro-batches {format_bytes(earlier_bytes)}"
    always = f"{format_bytes(budget.resident_bytes)} resident ({resident})" if resident else (
        "no resident memory")
    if optimizer and budget.optimizer_step_bytes > budget.resident_bytes + timeline.peak_bytes:
        memory = budget.optimizer_step
        return (f"At that minimum the step of {optimizer.name} is the fullest moment: {always}, "
                f"gradients {format_bytes(memory.gradients)}, the model's outputs "
                f"{format_bytes(memory.activations)}, temporaries of the optimizer's step "
                f"{format_bytes(memory.temporaries)}.")
    position = timeline.peak_position
    running = graph.ops[timeline.op_at(position)]
    holders = holders_at(graph, timeline, position)
    lines = [f"{format_bytes(size)} {what}" for what, size in holders[:_HOLDERS_SHOWN]]
    rest = sum(size for _, size in holders[_HOLDERS_SHOWN:])
    if rest:
        lines.append(f"{format_bytes(rest)} in {len(holders) - _HOLDERS_SHOWN} others")
    where = f" ({running.source})" if running.source else ""
    return (f"At that minimum memory is fullest while {running.name}{where} runs: {always}, and "
            f"{'; '.join(lines)}.")


def _replay_states(graph: TrainingGraph, timeline: Timeline
                   ) -> Iterator[tuple[TrainingOp, int, int]]:
    """Ops that run again and need state of their first run, with the positions of the first and the
    last run."""
    last = timeline.last_runs
    for index, begin in timeline.first_runs.items():
        if graph.ops[index].replay_state_bytes and begin < last[index]:
            yield graph.ops[index], begin, last[index]
