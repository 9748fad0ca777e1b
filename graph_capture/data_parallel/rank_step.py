"""The memory of the plain training step on one rank of a data-parallel run.

The model of the world: each rank runs the same step on a batch of its own, and the wrapper (DDP or
fully_shard) makes buffers and takes gradients at fixed moments.  The step is traced on tensors
without memory, as `graph_capture.plain_step.eager_step` does, while the wrapper's hooks run.

Under DDP the buckets are there from the start and are not traced; what is, is when a gradient
leaves: with `gradient_as_bucket_view` it goes into its bucket as soon as it is made.

Blind spots: those of `graph_capture.plain_step.eager_step` and
`graph_capture.data_parallel.fully_sharded`; DDP's broadcast of buffers at the start of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from graph_capture.data_parallel.fully_sharded import FullySharded, make_units
from graph_capture.memory.allocator import allocated_bytes
from graph_capture.memory.tracker import MemoryTracker, Workspace
from graph_capture.plain_step.loss import LossFn, objective
from graph_capture.twins.data_less import data_less_twin
from graph_capture.twins.fake import FakeTwin

CATEGORIES = ("unsharded_parameters", "gradients", "activations", "temporaries", "communication")
"""What `ParallelStep.by_category` tells apart."""


@dataclass(frozen=True, slots=True)
class ParallelStep:
    """Forward, loss and backward on one rank, above what is resident there."""

    peak_bytes: int
    by_category: Mapping[str, int]
    """Bytes at the peak; they sum to `peak_bytes`."""
    end_gradients_bytes: int
    """Gradients that are left when the backward has ended (those in buckets are not)."""
    end_activations_bytes: int
    """What the output holds then."""


class Wrapper:
    """What data parallelism does while a step runs; this one does nothing."""

    def attach(self, twin: FakeTwin, note: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        """Hook into the twin's model.  `note` is told of each buffer and what it is, a category."""

    def finish(self) -> list[torch.Tensor]:
        """The end of the backward; what is left of the gradients elsewhere than in `grad`."""
        return []


class IntoBuckets(Wrapper):
    """Each gradient goes into its bucket when it is made (`gradient_as_bucket_view`)."""

    def attach(self, twin: FakeTwin, note: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        for parameter in twin.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_release_gradient)


class Sharded(Wrapper):
    """Fully sharded parameters, gradients and optimizer state."""

    def __init__(self, units: Sequence[str], ranks: int, *,
                 reshard_after_forward: bool | None = None) -> None:
        self._units, self._ranks = units, ranks
        self._reshard_after_forward = reshard_after_forward
        self._runtime: FullySharded | None = None

    def attach(self, twin: FakeTwin, note: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        self._runtime = FullySharded(
            make_units(twin.model, self._units, self._reshard_after_forward), self._ranks,
            library_copies=twin.device.type == "cpu")  # gloo
        self._runtime.attach(lambda tensor, what: note(
            tensor, "unsharded_parameters" if what == "parameters" else what))

    def finish(self) -> list[torch.Tensor]:
        assert self._runtime is not None
        self._runtime.finish()
        return self._runtime.sharded_gradients


def trace_parallel_step(twin: FakeTwin, wrapper: Wrapper, loss_fn: LossFn | None = None, *,
                        workspace: Workspace) -> ParallelStep:
    """Trace one step of the twin's model under `wrapper`.

    Raises `CaptureError` where there is nothing to differentiate; an error of the model passes.
    """
    traced = data_less_twin(twin, extra=(loss_fn,)) if twin.trace_device.type == "cpu" else (
        replace(twin, extra=(*twin.extra, loss_fn)))
    loss_fn = traced.extra[-1]
    copies = list(traced.fake_of.values())
    tracker = MemoryTracker(workspace, device=traced.device, trace_device=traced.trace_device,
                            resident=copies)
    noted: dict[int, str] = {}

    def note(tensor: torch.Tensor, what: str) -> torch.Tensor:
        number = tracker.number_of(tensor)
        if number is not None:
            noted[number] = what
        return tensor

    wrapper.attach(traced, note)
    with traced.mode, tracker:
        output = traced.model(*traced.args, **traced.kwargs)
        goal = objective(output, loss_fn)
    torch.clear_autocast_cache()
    first_of_backward = tracker.start_of_backward()
    with traced.mode, torch.autocast(traced.trace_device.type, enabled=False), tracker:
        goal.backward()
        sharded = wrapper.finish()
    seeds = {tracker.number_of(seed) for seed in goal.seeds if seed is not None}
    left = [tensor.grad for tensor in copies if tensor.is_leaf and tensor.grad is not None]
    gradients = {tracker.number_of(gradient) for gradient in left}
    end_bytes = tracker.live_bytes
    end_gradients_bytes = sum(allocated_bytes(tensor.untyped_storage().nbytes(), traced.device)
                              for tensor in (*left, *sharded))
    tracker.close()

    def category(number: int) -> str:
        if number in noted:
            return noted[number]
        if number in gradients:
            return "gradients"
        return ("temporaries" if number >= first_of_backward or number in seeds
                else "activations")

    alive, transient = tracker.alive_at_peak()
    by_category = dict.fromkeys(CATEGORIES, 0)
    by_category["temporaries"] = transient
    for number, size in alive.items():
        by_category[category(number)] += size
    return ParallelStep(tracker.peak_bytes, by_category, end_gradients_bytes,
                        end_bytes - end_gradients_bytes)


def _release_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
