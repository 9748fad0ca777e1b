"""Predict the memory of one rank of a data-parallel run, without running it.

Model of the world: every rank runs the plain step on its own batch; the report is of the rank that
uses the most memory.

Blind spots: those of `graph_capture.plain_step.micro_batch`; memory of the communication library
outside torch's allocator (NCCL: some hundred megabytes on each GPU).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from planner._graph_capture.memory.trace import COMMUNICATION, MemoryTrace
from planner._graph_capture.op_costs.devices import Gpu
from planner._graph_capture.plain_step.loop import PlainLoop
from planner._graph_capture.training_graph import Category, OptimizerMemory
from planner.api import capture_for
from planner.arguments.inputs import split_inputs
from planner.arguments.parallel import DataParallel, check_parallel
from planner.arguments.planning import Planning
from planner.plans.plan import Plan
from planner.solvers.simulator import Timeline
from planner.step.breakdown import breakdown
from planner.step.categories import MemoryByCategory
from planner.step.rank_layout import FullyShardedLayout, Replicated, layout_of
from planner.step.variant import Variant
from planner.step.wrapped import beneath_wrappers


@dataclass(frozen=True, slots=True, eq=False)
class RankCategories(MemoryByCategory):
    """Mapping from category to bytes, in a fixed order; the categories sum to the peak.  Parameters
    are whole ones or this rank's shards, and so are gradients, which may be views of buckets."""

    unsharded_parameters: int = 0
    """Parameters of units that are gathered at the peak."""
    communication: int = 0
    """Buckets separate from the gradients; buffers of all-gather and reduce-scatter."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank; peaks include resident memory."""

    parallel: DataParallel
    peak_bytes: int
    memory: RankCategories
    """Bytes by category at the peak; sums to `peak_bytes`."""
    resident_bytes: int
    """Allocated between steps: parameters, buffers, inputs, optimizer state, DDP's buckets."""
    forward_backward_peak_bytes: int
    optimizer_step_peak_bytes: int
    """0 without an optimizer."""
    bucket_bytes: tuple[int, ...]
    """Sizes of DDP's buckets, in the order in which they are reduced."""
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
        from planner.reporters.memory_table import rank_report
        from planner.reporters.table import plain_text

        return plain_text(rank_report(self))


def data_parallel(model: nn.Module, inputs: object = None, *, parallel: DataParallel,
                  loss_fn: Callable[[Any], torch.Tensor] | None = None, optimizer: object = None,
                  plan: Plan | None = None, device: torch.device | str | None = None,
                  gpu: str | Gpu | None = None, probe: bool = True) -> RankMemory:
    """Predict the memory of one rank that trains `model` under `parallel`, with or without `plan`.

    No process is started and the model is not executed.

    Args:
        inputs: those of one rank's step.
        plan: may be a plan for a single device, made by blocks.

    Other arguments and errors are those of `planner.plan`.  Raises `PlanMismatch` if the plan was
    made for another step, and `ValueError` if it cannot run under `parallel`: a unit lies inside a
    region that the plan compiles as one graph.
    """
    check_parallel(parallel)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    args, kwargs = split_inputs(model, inputs)
    Planning(loss_fn=loss_fn, gpu=gpu)
    step = PlainLoop(
        beneath_wrappers(model, parallel), args, kwargs, loss_fn=loss_fn, device=device, gpu=gpu,
        probe=probe, make_layout=lambda fake_copy: layout_of(model, fake_copy, parallel))
    traced = step.optimizer(optimizer)
    plain = _breakdown(step, parallel, step.micro_batch().trace,
                       None if traced is None else traced.memory)
    if plan is None:
        return plain
    return _planned(model, inputs, plan, plain, loss_fn=loss_fn, optimizer=optimizer,
                    device=device, gpu=gpu, probe=probe)


def _breakdown(step: PlainLoop, parallel: DataParallel, trace: MemoryTrace,
               footprint: OptimizerMemory | None) -> RankMemory:
    layout = step.layout
    assert isinstance(layout, Replicated | FullyShardedLayout)
    notes = step.notes if footprint is not None else (
        *step.notes, "no optimizer was given: its state and its step are not counted")
    resident = {
        "parameters": layout.parameters_bytes,
        "buffers": step.fake_copy.resident.buffers_bytes,
        "inputs": step.fake_copy.resident.inputs_bytes,
        "gradients": layout.gradients_bytes,
        "optimizer": 0 if footprint is None else footprint.state_bytes,
        "communication": layout.communication_bytes,
    }
    resident_bytes = sum(resident.values())
    forward_backward = resident_bytes + trace.peak_bytes
    left: Counter[str] = Counter()  # gradients apart from those in buckets, and the output
    for number in trace.alive_after(len(trace.events)):
        block = trace.blocks[number]
        is_gradient = block.category is Category.GRADIENTS
        left["gradients" if is_gradient else "activations"] += block.size_bytes
    optimizer_step = 0 if footprint is None else (
        resident_bytes + left.total() + footprint.step_peak_bytes)
    alive = Counter(resident)
    if footprint is not None and optimizer_step > forward_backward:
        alive.update(left, temporaries=footprint.step_peak_bytes)
    else:
        for number in trace.alive_at_peak():
            block = trace.blocks[number]
            alive["unsharded_parameters" if block.category is Category.PARAMETERS else
                  "communication" if block.label == COMMUNICATION else block.category.value
                  ] += block.size_bytes
    return RankMemory(
        parallel=parallel, peak_bytes=max(forward_backward, optimizer_step),
        memory=RankCategories(**alive), resident_bytes=resident_bytes,
        forward_backward_peak_bytes=forward_backward, optimizer_step_peak_bytes=optimizer_step,
        bucket_bytes=layout.bucket_bytes, units=layout.units, notes=notes)


def _planned(model: nn.Module, inputs: object, plan: Plan, plain: RankMemory,
             **arguments: Any) -> RankMemory:
    """The report of a rank under `plan`; `plain`: its plain step; `arguments`: further ones of
    `plan`."""
    if plan.backend != "eager":
        raise ValueError(f"plan: the report of a rank follows plans that run op by op, and this "
                         f"one is for the backend {plan.backend!r}; its memory is in plan.memory, "
                         'or plan with backend="eager"')
    variant, timeline = capture_for(plan, model, inputs, parallel=plain.parallel, **arguments)
    found = breakdown(variant, timeline)
    alive: Counter[str] = Counter(found.memory)
    budget = variant.budget
    # Resident buckets count as buffers in a plan, and separately here.
    buckets = sum(plain.bucket_bytes)
    where = "gradients" if plain.parallel.gradient_as_bucket_view else "communication"
    alive.update({"buffers": -buckets, where: buckets})
    if found.peak_bytes == found.forward_backward_peak_bytes:
        gathered, sent = _of_wrapper(variant, timeline)
        alive.update({"parameters": -gathered, "unsharded_parameters": gathered,
                      "temporaries": -sent, "communication": sent})
    return replace(plain, peak_bytes=found.peak_bytes, memory=RankCategories(**alive),
                   resident_bytes=budget.resident_bytes,
                   forward_backward_peak_bytes=found.forward_backward_peak_bytes,
                   optimizer_step_peak_bytes=budget.optimizer_step_bytes,
                   notes=(*plain.notes, f"under a plan: the plain step takes "
                          f"{plain.peak_bytes:,} bytes"))


def _of_wrapper(variant: Variant, timeline: Timeline) -> tuple[int, int]:
    """Bytes of gathered parameters, and of collectives' buffers, at the peak."""
    position, gathered, sent = timeline.peak_position, 0, 0
    for instance in timeline.instances:
        buffer = variant.graph.buffers[instance.storage]
        if instance.birth <= position <= instance.death:
            gathered += buffer.size_bytes if buffer.kind is Category.PARAMETERS else 0
            sent += buffer.size_bytes if buffer.label == COMMUNICATION else 0
    return gathered, sent
