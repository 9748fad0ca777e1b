"""What one rank of a data-parallel run holds, without running one.

`ddp` is `torch.nn.parallel.DistributedDataParallel`; `zero1` the same with
`torch.distributed.optim.ZeroRedundancyOptimizer`; `fsdp2` is `torch.distributed.fsdp.fully_shard`.
In the terms of Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models" (SC 2020), `fully_shard` is stage 3, here `zero3`, and stage 2 where it keeps the parameters
from forward to backward, here `zero2`.

The model of the world: every rank runs the plain step on a batch of its own; the report is of the
rank that holds the most.

Blind spots: those of `graph_capture.data_parallel.rank_step`; what the communication library takes
for itself outside of torch's allocator (NCCL: some hundred megabytes on each GPU).
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from planner.arguments.inputs import split_inputs
from planner.step.categories import MemoryByCategory

if TYPE_CHECKING:
    import torch
    from torch import nn

    from graph_capture.data_parallel.rank_step import ParallelStep
    from graph_capture.training_graph import OptimizerMemory
    from graph_capture.twins.fake import FakeTwin
    from planner.ranks.layout import FullyShardedLayout, Replicated

KINDS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
_REPLICATED = ("ddp", "zero1")


@dataclass(frozen=True, slots=True)
class DataParallel:
    """How a training run is spread over ranks.

    Raises `ValueError` or `TypeError` for settings that do not belong together.
    """

    kind: Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
    ranks: int
    gradient_as_bucket_view: bool = False
    """`ddp`, `zero1`: gradients are views of the buckets instead of copies beside them."""
    bucket_cap_mb: float | None = None
    """`ddp`, `zero1`: size of a bucket in MiB as DDP takes it; `None`: 1 for the first, then 25."""
    units: tuple[str, ...] | None = None
    """The others: names of the modules that are wrapped one by one before the whole model is; a
    wildcard stands for one part of a name.  `None`: the elements of the outermost `ModuleList`s."""
    reshard_after_forward: bool | None = None
    """`fsdp2`: as for `fully_shard`; `None`: all units but the root reshard."""

    @property
    def is_replicated(self) -> bool:
        """Whether each rank holds the whole model."""
        return self.kind in _REPLICATED

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of data parallelism {self.kind!r}; known: "
                             f"{', '.join(KINDS)}")
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, numbers.Integral):
            raise TypeError(f"ranks must be a whole number, got {self.ranks!r}")
        if self.ranks < 2:
            raise ValueError(f"ranks must be at least 2, got {self.ranks}; one rank is what "
                             "planner.plan plans")
        replicated = self.is_replicated
        if not replicated and (self.gradient_as_bucket_view or self.bucket_cap_mb is not None):
            raise ValueError(f"{self.kind} has no buckets; gradient_as_bucket_view and "
                             "bucket_cap_mb are settings of ddp and zero1")
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be above 0, got {self.bucket_cap_mb}")
        if replicated and self.units is not None:
            raise ValueError(f"{self.kind} wraps the whole model; units are a setting of zero2, "
                             "zero3 and fsdp2")
        if isinstance(self.units, str):
            raise TypeError(f"units must be a tuple of names, got {self.units!r}; for one write "
                            f"units=({self.units!r},)")
        if self.kind != "fsdp2" and self.reshard_after_forward is not None:
            raise ValueError("reshard_after_forward is a setting of fsdp2; zero3 reshards, zero2 "
                             "does not")


@dataclass(frozen=True, slots=True, eq=False)
class RankCategories(MemoryByCategory):
    """A mapping from category to bytes, in a fixed order; the categories sum to the peak.
    Parameters are whole ones or this rank's shards; so are gradients, or in buckets as views."""

    unsharded_parameters: int = 0
    """Of the units that are gathered at that moment."""
    communication: int = 0
    """Buckets beside the gradients; buffers of all-gather and reduce-scatter."""


CATEGORIES = tuple(field.name for field in fields(RankCategories))
"""The categories of a rank's memory, in the order in which reports list them."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank; peaks include what is resident."""

    parallel: DataParallel
    peak_bytes: int
    memory: RankCategories
    """At the peak; sums to `peak_bytes`."""
    resident_bytes: int
    """Held between steps: parameters, buffers, inputs, optimizer state, DDP's buckets."""
    forward_backward_peak_bytes: int
    optimizer_step_peak_bytes: int
    """0 without an optimizer."""
    bucket_bytes: tuple[int, ...]
    """DDP's buckets, in the order in which they are reduced."""
    units: tuple[tuple[str, int], ...]
    """Wrapped modules and the bytes of their whole parameters; the root, named "", last."""
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "kind": self.parallel.kind,
            "ranks": self.parallel.ranks,
            "peak_bytes": self.peak_bytes,
            "resident_bytes": self.resident_bytes,
            "forward_backward_peak_bytes": self.forward_backward_peak_bytes,
            "optimizer_step_peak_bytes": self.optimizer_step_peak_bytes,
            "memory": dict(self.memory),
            "bucket_bytes": list(self.bucket_bytes),
            "units": [{"module": name, "bytes": size} for name, size in self.units],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from planner.reporters.ranks import rank_report
        from planner.reporters.table import plain_text

        return plain_text(rank_report(self))


def data_parallel(model: nn.Module, inputs: object = None, *, parallel: DataParallel,
                  loss_fn: Callable[[Any], torch.Tensor] | None = None, optimizer: object = None,
                  device: torch.device | str | None = None, probe: bool = True) -> RankMemory:
    """The memory of one rank that trains `model` under `parallel`.

    `inputs` are those of one rank's step.  The other arguments, and the errors, are those of
    `planner.plan`; neither is a process started nor the model executed.
    """
    from torch import nn

    if not isinstance(parallel, DataParallel):
        raise TypeError("parallel must be a planner.DataParallel, such as "
                        f"DataParallel('ddp', ranks=8), got {type(parallel).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    args, kwargs = split_inputs(model, inputs)
    return _trace(model, args, kwargs, parallel, loss_fn, optimizer, device, probe)


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
           parallel: DataParallel, loss_fn: Callable[[Any], torch.Tensor] | None,
           optimizer: object, device: torch.device | str | None, probe: bool) -> RankMemory:
    from graph_capture.data_parallel.rank_step import trace_parallel_step
    from graph_capture.op_costs.costs import OpCosts
    from graph_capture.torch_compat import quiet_fake_tensors
    from graph_capture.twins.fake import make_twin
    from planner.ranks.layout import layout_of

    with quiet_fake_tensors():
        twin = make_twin(model, args, kwargs, device=device,
                         extra=() if loss_fn is None else (loss_fn,))
        layout = layout_of(model, twin, parallel)
        costs = OpCosts(twin.device, probe=probe)
        step = trace_parallel_step(twin, layout.wrapper(),
                                   None if loss_fn is None else twin.extra[0],
                                   workspace=costs.workspace_bytes)
        footprint = None if optimizer is None else layout.optimizer(optimizer)
    notes = [] if not costs.assumed else [
        "workspace is a stated margin, not a measurement, for: " + ", ".join(sorted(costs.assumed))]
    if optimizer is None:
        notes.append("no optimizer was given: its state and its step are not counted")
    return _account(twin, parallel, layout, step, footprint, tuple(notes))


def _account(twin: FakeTwin, parallel: DataParallel,
             layout: Replicated | FullyShardedLayout, step: ParallelStep,
             footprint: OptimizerMemory | None, notes: tuple[str, ...]) -> RankMemory:
    resident = {
        "parameters": layout.parameters_bytes,
        "buffers": twin.resident.buffers_bytes,
        "inputs": twin.resident.inputs_bytes,
        "gradients": layout.gradients_bytes,
        "optimizer": 0 if footprint is None else footprint.state_bytes,
        "communication": layout.communication_bytes,
    }
    resident_bytes = sum(resident.values())
    forward_backward = resident_bytes + step.peak_bytes
    optimizer_step = 0 if footprint is None else (
        resident_bytes + step.end_gradients_bytes + step.end_activations_bytes
        + footprint.step_peak_bytes)
    alive = Counter(resident)
    if footprint is not None and optimizer_step > forward_backward:
        alive.update(gradients=step.end_gradients_bytes, activations=step.end_activations_bytes,
                     temporaries=footprint.step_peak_bytes)
    else:
        alive.update(step.by_category)
    return RankMemory(
        parallel=parallel, peak_bytes=max(forward_backward, optimizer_step),
        memory=RankCategories(**alive), resident_bytes=resident_bytes,
        forward_backward_peak_bytes=forward_backward, optimizer_step_peak_bytes=optimizer_step,
        bucket_bytes=layout.bucket_bytes, units=layout.units, notes=notes)
