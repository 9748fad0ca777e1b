"""The memory of the training step as plain PyTorch runs it: what the user has today.

The model of the world: forward, loss and backward run on fake tensors under the real autograd, and
storages live as long as somebody refers to them.  The caller is taken to be
`output = model(...); loss = loss_fn(output); loss.backward()`: it holds the output and the loss to
the end of the backward.  Gradients are `None` before, as after `zero_grad()`, and the parameters'
gradients stay.  Under autocast, forward and loss run inside and the backward outside, as torch's
documentation has it.

Blind spots: those of `memory_tracker`; memory held by reference cycles goes when the garbage
collector runs, at some other time than in the real step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from graph_capture.errors import CaptureError
from graph_capture.fake_twin import FakeTwin
from graph_capture.hollow import hollow_twin
from graph_capture.loss import LossFn, LossFootprint, objective, trace_loss
from graph_capture.memory_tracker import MemoryTracker, Workspace
from graph_capture.torch_compat import NoStaticShape
from graph_capture.training_graph import BufferKind


@dataclass(frozen=True, slots=True)
class EagerStep:
    """Memory of one plain training step, above what is resident."""

    peak_bytes: int
    by_category: Mapping[BufferKind, int]
    """Bytes of each kind at the peak; they sum to `peak_bytes`.  Workspace is a temporary."""
    forward_peak_bytes: int
    """The most before the backward begins, the loss included."""
    end_bytes: int
    """What is left when the step ends and its output is released: the gradients."""
    loss: LossFootprint
    plain: bool
    """Whether the code ran on what it takes for plain tensors; else on fake ones, which some
    libraries treat in another way."""


def trace_eager_step(twin: FakeTwin, loss_fn: LossFn | None = None, *, workspace: Workspace,
                     forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
                     ) -> EagerStep:
    """Trace forward, loss and backward of the twin; it has no gradients before and after.

    `forward_context` makes what the user wraps around the forward and the loss, e.g.
    `lambda: torch.autocast("cpu", torch.bfloat16)`; an autocast that is active at the time of the
    call counts too.

    Raises `CaptureError` where there is nothing to differentiate; an error of the model passes.
    """
    if twin.trace_device.type == "cpu":
        try:
            plain = hollow_twin(twin, extra=(loss_fn,))
            return _trace(plain, plain.extra[-1], workspace, forward_context, plain=True)
        except Exception:  # whatever a plain tensor without values cannot do, a fake one may
            pass
    try:
        return _trace(twin, loss_fn, workspace, forward_context, plain=False)
    except NoStaticShape as error:
        raise CaptureError(
            f"the model's code depends on a value of a tensor (it asked for {error}), and a plan "
            "is made without values; decide by shapes or by arguments instead") from error


def _trace(twin: FakeTwin, loss_fn: LossFn | None, workspace: Workspace,
           forward_context: Callable[[], AbstractContextManager[Any]], *, plain: bool) -> EagerStep:
    copies = list(twin.fake_of.values())
    tracker = MemoryTracker(workspace, device=twin.device, trace_device=twin.trace_device,
                            resident=copies)
    try:
        with forward_context():
            with twin.mode, tracker:
                output = twin.model(*twin.args, **twin.kwargs)
            footprint = trace_loss(loss_fn, output, twin, workspace)
            with twin.mode, tracker:
                goal = objective(output, loss_fn)
        # What leaving a user's outermost autocast does: casts of parameters are no longer kept.
        torch.clear_autocast_cache()
        forward_peak = tracker.peak_bytes
        first_of_backward = tracker.start_of_backward()
        with twin.mode, _no_autocast(twin.trace_device), tracker:
            goal.backward()
        seeds = {tracker.number_of(seed) for seed in goal.seeds if seed is not None}
        gradients = {tracker.number_of(tensor.grad) for tensor in copies
                     if tensor.is_leaf and tensor.grad is not None}
        del output, goal
        end = tracker.live_bytes
    finally:
        tracker.close()
        for tensor in copies:
            if tensor.is_leaf:
                tensor.grad = None

    alive, transient = tracker.alive_at_peak()
    by_category = dict.fromkeys(BufferKind, 0)
    by_category[BufferKind.TEMPORARY] = transient
    for number, size in alive.items():
        kind = (BufferKind.GRADIENT if number in gradients
                else BufferKind.TEMPORARY if number >= first_of_backward or number in seeds
                else BufferKind.ACTIVATION)
        by_category[kind] += size
    return EagerStep(tracker.peak_bytes, by_category, forward_peak, end, footprint, plain)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
