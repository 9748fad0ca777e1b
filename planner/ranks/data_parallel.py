"""Predict the memory of one rank of a data-parallel run, without running it.

Model of the world: every rank runs the plain step on its own batch; the report is of the rank that
uses the most memory.

Blind spots: those of `graph_capture.data_parallel.rank_step`; memory of the communication library
outside torch's allocator (NCCL: some hundred megabytes on each GPU).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner.arguments.inputs import split_inputs
from planner.arguments.parallel import DataParallel, check_parallel
from planner.arguments.planning import Planning
from planner.ranks.rank_memory import RankCategories, RankMemory

if TYPE_CHECKING:
    import torch
    from torch import nn

    from planner._graph_capture.data_parallel.rank_step import ParallelStep
    from planner._graph_capture.fake_copies.fake import FakeCopy
    from planner._graph_capture.op_costs.devices import Gpu
    from planner._graph_capture.training_graph import OptimizerMemory
    from planner.plans.plan import Plan
    from planner.step.rank_layout import FullyShardedLayout, Replicated

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
    from torch import nn

    check_parallel(parallel)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    args, kwargs = split_inputs(model, inputs)
    Planning(loss_fn=loss_fn, gpu=gpu)
    plain = _trace(model, args, kwargs, parallel, loss_fn, optimizer, device, gpu, probe)
    if plan is None:
        return plain
    from planner.ranks.planned_rank import planned_rank

    return planned_rank(model, inputs, plan, plain, loss_fn=loss_fn, optimizer=optimizer,
                        device=device, gpu=gpu, probe=probe)


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
           parallel: DataParallel, loss_fn: Callable[[Any], torch.Tensor] | None,
           optimizer: object, device: torch.device | str | None, gpu: str | Gpu | None,
           probe: bool) -> RankMemory:
    from planner._graph_capture.data_parallel.rank_step import trace_parallel_step
    from planner._graph_capture.fake_copies.fake import device_planned_for, make_fake_copy
    from planner._graph_capture.op_costs.costs import OpCosts
    from planner._graph_capture.op_costs.devices import compute_capability
    from planner._graph_capture.optimizer.step import trace_optimizer
    from planner._graph_capture.torch_compat import quiet_fake_tensors
    from planner.step.rank_layout import layout_of
    from planner.step.wrapped import beneath_wrappers

    with quiet_fake_tensors():
        target = device_planned_for(model, device)
        fake_copy = make_fake_copy(beneath_wrappers(model, parallel), args, kwargs, device=target,
                                   extra=() if loss_fn is None else (loss_fn,),
                                   capability=compute_capability(target, gpu))
        layout = layout_of(model, fake_copy, parallel)
        costs = OpCosts(fake_copy.device, probe=probe, gpu=gpu)
        step = trace_parallel_step(fake_copy, layout.wrapper(),
                                   None if loss_fn is None else fake_copy.extra[0],
                                   workspace=costs.workspace_bytes)
        footprint = (None if optimizer is None
                     else trace_optimizer(*layout.share_of(optimizer),
                                          workspace=costs.workspace_bytes))
    notes = [] if costs.assumption is None else [costs.assumption]
    if costs.assumed:
        notes.append("workspace is a stated margin, not a measurement, for: "
                     + ", ".join(sorted(costs.assumed)))
    if optimizer is None:
        notes.append("no optimizer was given: its state and its step are not counted")
    return _breakdown(fake_copy, parallel, layout, step, footprint, tuple(notes))


def _breakdown(fake_copy: FakeCopy, parallel: DataParallel,
               layout: Replicated | FullyShardedLayout, step: ParallelStep,
               footprint: OptimizerMemory | None, notes: tuple[str, ...]) -> RankMemory:
    resident = {
        "parameters": layout.parameters_bytes,
        "buffers": fake_copy.resident.buffers_bytes,
        "inputs": fake_copy.resident.inputs_bytes,
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
