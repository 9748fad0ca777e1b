"""A captured step, completed by facts that are known only once it has run.

The model of the world: the optimizer, earlier gradients and the memory of the caller's loss change
the memory breakdown of a step, but not its graph.  They are added afterwards without another
capture; only the plain step, with which a plan is compared, is traced again.

Blind spots: a loss that ignores differentiable outputs changes the graph, and a loss behind several
graphs is part of the code recorded between them.  Both need another capture, with `ReplayedLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from planner._graph_capture.capture import CapturedStep
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.plain_step.loss import Until
from planner._graph_capture.plain_step.micro_batch import EagerStep
from planner._graph_capture.plain_step.observed_loss import (
    ObservedLoss,
    ReplayedLoss,
    without_watches,
)
from planner._graph_capture.step.released_output import with_output_released
from planner._graph_capture.torch_compat import quiet_fake_tensors, undisturbed_autograd
from planner._graph_capture.training_graph import (
    HELD_IN_FORWARD,
    LOSS_BACKWARD,
    Buffer,
    Category,
    Phase,
    TrainingGraph,
    pseudo_op,
)


def with_seen_loss(step: CapturedStep, seen: ObservedLoss) -> CapturedStep:
    """The step, captured without a loss, with the memory of the observed loss, which may let go of
    the output."""
    lives = [each.until for each in seen.outputs]
    step = replace(
        _with_graphs(step, lambda graph: _with_loss(graph, seen)),
        tracing=replace(step.tracing, loss_fn=ReplayedLoss(seen),
                        holds_output=step.holds_output and _outlives(lives)))
    baseline = _traced(step) or step.baseline
    later = step.later and (_traced(step, baseline.with_gradient) or step.later)
    return with_output_let_go(replace(step, baseline=baseline, later=later), lives)


def with_room(step: CapturedStep, room_bytes: int) -> CapturedStep:
    """The step whose schedules leave this much to others between forward and backward; the plain
    step does not."""
    return step if not room_bytes else _with_graphs(
        step, lambda graph: _with_room(graph, room_bytes))


def with_output_let_go(step: CapturedStep, lives: Sequence[Until]) -> CapturedStep:
    """The step with an output whose tensors live as long as `lives` says."""
    if _outlives(lives):
        return step
    if step.holds_output:
        step = replace(step, tracing=replace(step.tracing, holds_output=False), later=None)
        step = replace(step, baseline=_traced(step) or step.baseline)
    return replace(_with_graphs(step, lambda graph: with_output_released(graph, lives)),
                   compiled=step.compiled and replace(step.compiled, holds_output=False))


def with_held(step: CapturedStep, held_bytes: int, pending_bytes: int = 0) -> CapturedStep:
    """The step with `held_bytes` more of the caller's memory throughout, and `pending_bytes` more
    of other calls' memory until the backward ends."""
    return _with_graphs(step, lambda graph: replace(graph, resident=replace(
        graph.resident, inputs_bytes=graph.resident.inputs_bytes + held_bytes,
        pending_bytes=graph.resident.pending_bytes + pending_bytes)))


def with_held_in_forward(step: CapturedStep, held_bytes: int, loss: ObservedLoss | None
                         ) -> CapturedStep:
    """The step with `held_bytes` more of the caller's memory until the backward begins: gradients
    of the step before, which are then gone.  `loss`: the one outside the model."""
    workspace_bytes = 0 if loss is None else max(
        0, (loss.forward_peak_bytes or loss.peak_bytes) - loss.held_bytes)
    return step if not held_bytes else _with_graphs(
        step, lambda graph: _with_held_in_forward(graph, held_bytes, workspace_bytes))


def with_earlier_gradients(step: CapturedStep) -> CapturedStep:
    """The step with a traced later micro-batch of accumulated gradients."""
    if step.later is not None:
        return step
    later = _traced(step, step.baseline.with_gradient)
    return replace(step, later=later or step.baseline)


def _with_graphs(step: CapturedStep, change: Callable[[TrainingGraph], TrainingGraph]
                 ) -> CapturedStep:
    return replace(step, variants=tuple(
        replace(variant, graph=change(variant.graph)) for variant in step.variants))


def _outlives(lives: Sequence[Until]) -> bool:
    """True if each tensor of the output lives until the backward ends."""
    return all(until is Until.END for until in lives)


@without_watches()
@quiet_fake_tensors()
@undisturbed_autograd()
def _traced(step: CapturedStep, with_gradient: Set[str] = frozenset()) -> EagerStep | None:
    """The plain step; `None` if it depends on inputs that no longer exist."""
    try:
        return step.tracing.plain_step(step.tracing.loss_fn, with_gradient)
    except CaptureError:
        return None


def _with_loss(graph: TrainingGraph, seen: ObservedLoss) -> TrainingGraph:
    """The graph with the cotangents and the memory of the observed loss."""
    start = graph.index_of[LOSS_BACKWARD]
    cotangents = set(graph.ops[start].outputs)
    buffers = tuple(replace(buffer, kept_to_end=False) if index in cotangents else buffer
                    for index, buffer in enumerate(graph.buffers))
    taken = sum(graph.buffers[index].size_bytes for index in cotangents) + seen.held_bytes
    ops = list(graph.ops)
    ops[start] = replace(ops[start], workspace_bytes=max(0, seen.peak_bytes - taken))
    return replace(graph, ops=tuple(ops), buffers=buffers, resident=replace(
        graph.resident, inputs_bytes=graph.resident.inputs_bytes + seen.held_bytes))


def _with_room(graph: TrainingGraph, room_bytes: int) -> TrainingGraph:
    start = graph.index_of[LOSS_BACKWARD]
    op = graph.ops[start]
    above_bytes = room_bytes - sum(graph.buffers[index].size_bytes for index in op.outputs)
    ops = list(graph.ops)
    ops[start] = replace(op, workspace_bytes=max(op.workspace_bytes, above_bytes))
    return replace(graph, ops=tuple(ops))


def _with_held_in_forward(graph: TrainingGraph, held_bytes: int, workspace_bytes: int
                          ) -> TrainingGraph:
    """The graph between an op that makes a buffer and one, before the backward of the loss, that
    reads it; the latter takes `workspace_bytes`."""
    end = graph.index_of[LOSS_BACKWARD]
    held = len(graph.buffers)
    first = pseudo_op(HELD_IN_FORWARD, Phase.FORWARD, -1, (), (held,))
    last = pseudo_op("loss/with the gradients of the step before#0", Phase.LOSS, -1, (held,), (),
                     workspace_bytes)
    buffers = (*(replace(buffer, producer=buffer.producer + 1 + (buffer.producer >= end))
                 for buffer in graph.buffers), Buffer(held_bytes, 0, Category.TEMPORARIES))
    return replace(
        graph, ops=(first, *graph.ops[:end], last, *graph.ops[end:]), buffers=buffers,
        regions=tuple(replace(
            region, forward=range(region.forward.start + 1, region.forward.stop + 1),
            backward=range(region.backward.start + 2, region.backward.stop + 2))
            for region in graph.regions))
