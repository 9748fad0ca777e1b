"""The objective of a training step, and the memory of a loss computed outside the model.

The rule is the same wherever a step is traced, captured or measured: `loss_fn(output)` if one is
given; else `output.loss` or `output["loss"]`; else the output itself if it is a scalar; else each
differentiable tensor of the output gets a cotangent of its own size, which counts as memory and
which the caller keeps alive to the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.memory.tracker import MemoryTracker, Workspace
from planner._graph_capture.output_tensors import output_tensors, with_changed_tensors
from planner._graph_capture.torch_compat import storage_key


@dataclass(frozen=True, slots=True)
class Objective:
    """The arguments of `torch.autograd.backward`."""

    roots: tuple[torch.Tensor, ...]
    seeds: tuple[torch.Tensor | None, ...]
    """The cotangent of each root; `None`: the 1 that autograd makes for a scalar."""

    def backward(self) -> None:
        """Accumulate the gradients."""
        torch.autograd.backward(self.roots, self.seeds)


class Until(StrEnum):
    """Lifetime of a tensor of an output that the caller releases, from the shortest to the
    longest."""

    LOSS = "loss"
    """Until the loss is computed from it."""
    LOSS_BACKWARD = "loss backward"
    """Until the backward of the loss, which needs it."""
    MODEL_BACKWARD = "model backward"
    """Until the backward of the model, if that needs it; otherwise to the end of the step."""
    END = "end"
    """To the end of the step: it is the loss, or is kept anyway."""


LossFn = Callable[[Any], torch.Tensor | Objective]


@dataclass(frozen=True, slots=True)
class OpenLoss:
    """An unknown loss: the caller differentiates either the `loss` of the output or a loss computed
    from its other tensors."""

    largest_bytes: float
    """Larger tensors, such as logits, are assumed to be only for inspection."""
    with_left: bool = False
    """True if he also differentiates tensors that a call leaves elsewhere, such as auxiliary
    losses in a list."""

    def __call__(self, output: Any, left: Iterable[torch.Tensor] = ()) -> Objective:
        """All tensors that the caller may differentiate; `left`: found where a call may leave some.
        """
        named = _named_loss(output)
        is_whole = named is None or named.numel() == 1  # else the caller reduces it
        goal = objective(output, None) if is_whole else _of_all(output)
        returned = output_tensors(output)
        beside: list[torch.Tensor] = []
        if len(goal.roots) == 1 and goal.seeds == (None,):
            beside += [tensor for tensor in returned
                       if tensor.requires_grad and tensor is not goal.roots[0]
                       and tensor.nbytes <= self.largest_bytes]
        if self.with_left:
            known, of_call = {*map(id, returned)}, _nodes(goal.roots)
            others = {id(tensor): tensor for tensor in left
                      if tensor.grad_fn is not None and id(tensor) not in known}
            beside += [tensor for tensor in others.values()
                       if not of_call.isdisjoint(_nodes([tensor]))]
        if not beside:
            return goal
        roots = (*goal.roots, *beside)
        return Objective(roots, tuple(torch.ones_like(root) for root in roots))


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """The gradient of a tensor of the output."""

    flows: bool
    size_bytes: int
    """Size of the cotangent; 0 if none flows."""
    until: Until = Until.END


@dataclass(frozen=True, slots=True)
class LossFootprint:
    """Memory of the loss outside the model, above the memory when the model returns."""

    retained_bytes: int
    """Alive from its forward to its backward: saved tensors, the loss itself."""
    forward_peak_bytes: int
    """Maximum during its forward; at least `retained_bytes`."""
    backward_peak_bytes: int
    """Maximum during its backward, with the retained memory and the cotangents."""
    outputs: tuple[OutputGradient, ...]
    """For each tensor of the output, in the order of `output_tensors`."""
    is_missing: bool = False
    """True if no loss was given or found: each differentiable output got a cotangent of its own
    size."""


def objective(output: Any, loss_fn: LossFn | None, fake_copy: FakeCopy | None = None) -> Objective:
    """The roots and cotangents of the step's backward; see the module's rule.  `fake_copy`: the one
    whose last call has returned the output.

    Raises `CaptureError` if nothing can be differentiated, or a given loss is no scalar.
    """
    if isinstance(loss_fn, OpenLoss):
        return loss_fn(output, () if fake_copy is None or not loss_fn.with_left
                       else fake_copy.left_by_call())
    if loss_fn is not None:
        loss = loss_fn(output)
        return loss if isinstance(loss, Objective) else _of_scalar(
            loss, "the loss that `loss_fn` returned")
    named = _named_loss(output)
    if named is not None:
        return _of_scalar(named, "the output's `loss`")
    if isinstance(output, torch.Tensor) and output.numel() == 1 and output.requires_grad:
        return Objective((output,), (None,))
    return _of_all(output)


def _named_loss(output: Any) -> torch.Tensor | None:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) else None


def _of_all(output: Any) -> Objective:
    roots = tuple(tensor for tensor in output_tensors(output) if tensor.requires_grad)
    if not roots:
        raise CaptureError(
            "no tensor that needs a gradient was found in what the model returns "
            f"({_described(output)}): give labels, so that it returns a loss, or trainable "
            "parameters; where tensors are hidden in an object, keep them in its attributes, or "
            "return them")
    return Objective(roots, tuple(torch.ones_like(root) for root in roots))


def _nodes(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes of the tensors' autograd graph but for its leaves, which calls share."""
    found: set[Any] = set()
    pending = [tensor.grad_fn for tensor in tensors]
    while pending:
        node = pending.pop()
        if node is not None and node.next_functions and node not in found:
            found.add(node)
            pending += [following for following, _ in node.next_functions]
    return found


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def trace_loss(loss_fn: LossFn | None, output: Any, fake_copy: FakeCopy,
               workspace: Workspace) -> LossFootprint:
    """The footprint of the loss of `output`, an output of the fake copy's model under its mode.

    The tensors of the output count as independent, whatever their origin in the model, and the
    model's own graph is not touched.
    """
    with fake_copy.mode:
        output = with_changed_tensors(_as_leaf, output)
    tensors = output_tensors(output)
    tracker = MemoryTracker(workspace, device=fake_copy.device, trace_device=fake_copy.trace_device,
                            resident=(*tensors, *fake_copy.fake_of.values()))
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not wanted:
        raise CaptureError(
            "no tensor that needs a gradient was found in what the model returns "
            f"({_described(output)}), so what the loss takes cannot be followed: keep tensors in "
            "attributes of an object, not in closures, or return them")
    saved: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(storage_key(tensor))
        return tensor

    with fake_copy.as_on_device(), fake_copy.mode, tracker:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            goal = objective(output, loss_fn, fake_copy)
        forward_peak, retained = tracker.peak_bytes, tracker.live_bytes
        tracker.restart_peak()
        tracker.start_of_backward()
        gradients = torch.autograd.grad(goal.roots, wanted, goal.seeds, allow_unused=True)
    tracker.close()
    gradient_of = dict(zip(map(id, wanted), gradients, strict=True))
    losses = {storage_key(root) for root in goal.roots}

    def gradient(tensor: torch.Tensor) -> OutputGradient:
        found, key = gradient_of.get(id(tensor)), storage_key(tensor)
        return OutputGradient(
            found is not None, 0 if found is None else (
                allocated_bytes(found.untyped_storage().nbytes(), fake_copy.device)),
            Until.END if key in losses else Until.LOSS_BACKWARD if key in saved else Until.LOSS)

    return LossFootprint(retained, forward_peak, tracker.peak_bytes,
                         tuple(gradient(tensor) for tensor in tensors),
                         is_missing=any(seed is not None for seed in goal.seeds))


def _described(output: Any) -> str:
    """Description of an output's kind, for an error."""
    count = len(output_tensors(output))
    return f"{type(output).__name__} with {count} tensors" if count else type(output).__name__


def _of_scalar(loss: Any, what: str) -> Objective:
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"{what} is a {type(loss).__name__}; expected a tensor with one element")
    if loss.numel() != 1:
        raise CaptureError(f"{what} has the shape {tuple(loss.shape)}; expected one element: "
                           "reduce it, e.g. with .mean()")
    if not loss.requires_grad:
        raise CaptureError(f"{what} needs no gradient: it depends on no trainable parameter")
    return Objective((loss,), (None,))
