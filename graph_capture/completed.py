"""A captured step, completed by what is known of it only once it has run.

The model of the world: the graph of a step does not depend on the optimizer, on gradients that are
there before it, or on how much memory the caller's loss takes; the breakdown of it does.  So these
are put in place afterwards, without capturing again; the plain step, with which a plan is compared,
is traced anew.

Blind spots: a loss that leaves out differentiable outputs gives another graph, and one that comes
behind several graphs is part of what was recorded between them: both need another capture (with
`ReplayedLoss`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from planner._graph_capture.capture import CapturedStep
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.plain_step.eager_step import EagerStep
from planner._graph_capture.plain_step.loss import LossFn, Until
from planner._graph_capture.plain_step.observed_loss import ObservedLoss, ReplayedLoss
from planner._graph_capture.step.released_output import with_output_released
from planner._graph_capture.torch_compat import quiet_fake_tensors, undisturbed_autograd
from planner._graph_capture.training_graph import LOSS_BACKWARD, TrainingGraph


def with_optimizer(step: CapturedStep, optimizer: object) -> CapturedStep:
    """The step with this optimizer: an instance, class or name, or several instances; `None`: none
    is counted.

    Raises as `graph_capture.optimizer.step.trace_optimizer_steps`.
    """
    return replace(step, optimizer_steps=step.tracing.optimizer(
        optimizer, step.baseline.with_gradient))


def with_seen_loss(step: CapturedStep, seen: ObservedLoss) -> CapturedStep:
    """The step, captured without a loss, with the memory of the one that was seen."""
    loss = ReplayedLoss(seen)
    baseline = _traced(step, loss) or step.baseline
    later = step.later and (_traced(step, loss, baseline.with_gradient) or step.later)
    return replace(
        step, variants=tuple(replace(variant, graph=_with_loss(variant.graph, seen))
                          for variant in step.variants),
        baseline=baseline, later=later, tracing=replace(step.tracing, loss_fn=loss))


def with_output_let_go(step: CapturedStep, lives: Sequence[Until]) -> CapturedStep:
    """The step, captured with its output held, in which each tensor of it lives so long."""
    if all(until is Until.END for until in lives):
        return step
    step = replace(step, tracing=replace(step.tracing, holds_output=False), later=None)
    return replace(
        step, variants=tuple(replace(variant, graph=with_output_released(variant.graph, lives))
                          for variant in step.variants),
        baseline=_traced(step, step.tracing.loss_fn) or step.baseline,
        compiled=step.compiled and replace(step.compiled, holds_output=False))


def with_held(step: CapturedStep, held_bytes: int, pending_bytes: int = 0) -> CapturedStep:
    """The step with so much more that the caller holds throughout; `pending_bytes`: and that other
    calls hold, to the end of the backward."""
    return replace(step, variants=tuple(replace(variant, graph=replace(
        variant.graph, resident=replace(
            variant.graph.resident,
            inputs_bytes=variant.graph.resident.inputs_bytes + held_bytes,
            pending_bytes=variant.graph.resident.pending_bytes + pending_bytes)))
        for variant in step.variants))


def with_earlier_gradients(step: CapturedStep) -> CapturedStep:
    """The step with what a later micro-batch of accumulated gradients takes."""
    if step.later is not None:
        return step
    later = _traced(step, step.tracing.loss_fn, step.baseline.with_gradient)
    return replace(step, later=later or step.baseline)


@quiet_fake_tensors()
@undisturbed_autograd()
def _traced(step: CapturedStep, loss_fn: LossFn | None, with_gradient: Set[str] = frozenset()
            ) -> EagerStep | None:
    """The plain step; `None` where it depends on inputs that are gone since."""
    try:
        return step.tracing.plain_step(loss_fn, with_gradient)
    except CaptureError:
        return None


def _with_loss(graph: TrainingGraph, seen: ObservedLoss) -> TrainingGraph:
    """The graph whose cotangents are those of a loss that takes what was seen."""
    start = graph.index_of[LOSS_BACKWARD]
    cotangents = set(graph.ops[start].outputs)
    buffers = tuple(replace(buffer, kept_to_end=False) if index in cotangents else buffer
                    for index, buffer in enumerate(graph.buffers))
    taken = sum(graph.buffers[index].size_bytes for index in cotangents) + seen.held_bytes
    ops = list(graph.ops)
    ops[start] = replace(ops[start], workspace_bytes=max(0, seen.peak_bytes - taken))
    return replace(graph, ops=tuple(ops), buffers=buffers, resident=replace(
        graph.resident, inputs_bytes=graph.resident.inputs_bytes + seen.held_bytes))


