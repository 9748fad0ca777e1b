"""`planner.memory`: memory breakdown of the whole training loop, without or with a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from planner._graph_capture.fake_copies.fake import device_planned_for
from planner._graph_capture.op_costs.cuda_workspace import held_workspace_bytes
from planner._graph_capture.op_costs.devices import Gpu, device_model
from planner._graph_capture.optimizer.named import optimizer_name
from planner._graph_capture.optimizer.step import OptimizerSettings, OptimizerTrace
from planner._graph_capture.plain_step.loop import PlainLoop
from planner.api import capture_for
from planner.arguments.inputs import split_inputs
from planner.arguments.parallel import DataParallel, check_parallel
from planner.arguments.planning import Planning, check_in_backward, check_number
from planner.plans.plan import Plan
from planner.progress import Progress, watched
from planner.step.loop_trace import LoopTrace, MicroBatches, TrainingLoop, compose
from planner.step.planned_micro_batch import planned_micro_batch
from planner.step.rank_layout import layout_of
from planner.step.reserved import expandable_segments, reserved_by
from planner.step.wrapped import beneath_wrappers
from planner.training_loop.report import MemoryReport, breakdown_of

_ZERO_GRAD = ("after_step", "before_backward")
_HOLD_OUTPUT = (True, False, "backward", "step", "loop")


def memory(model: nn.Module, inputs: object = None, *, optimizer: object = None,
           loss_fn: Callable[[Any], torch.Tensor] | None = None, plan: Plan | None = None,
           accumulation: int = 1, autocast: torch.dtype | str | None = None,
           grad_clip: float | None = None, grad_scaler: bool = False, set_to_none: bool = True,
           zero_grad: Literal["after_step", "before_backward"] = "after_step",
           hold_output: bool | Literal["backward", "step", "loop"] = True,
           parallel: DataParallel | None = None,
           optimizer_in_backward: bool = False,
           device: torch.device | str | None = None, gpu: str | Gpu | None = None,
           probe: bool = True,
           progress: Progress | None = None) -> MemoryReport:
    """Predict the memory of a training loop of `model`, phase by phase: loading, forward, loss,
    backward, the optimizer's step, and the next iteration; in the first step and in later ones.

    The model is not executed: the plain step and two optimizer steps are traced on tensors without
    memory.  The model is not changed.

    Args:
        model, inputs, loss_fn, device, gpu, probe, progress: as for `planner.plan`.
        optimizer: an instance, a class, or a name such as `"adamw"`; or several instances, which
            step one after the other.  Its own `step` is traced, so any optimizer written in torch
            works; of an instance, groups and settings count.  An instance that updates copies of
            the parameters (fp32 master weights) is assumed to get the model's gradients copied
            before each step.  If `step` takes a closure (L-BFGS), the closure is assumed to reset
            the gradients and to run the micro-batches, with nothing before it.
        plan: a plan for this model and these inputs; `None`: the plain step.
        accumulation: micro-batches per optimizer step; `inputs` are those of one.
        autocast: run forward and loss within `torch.autocast` to this dtype (`"bf16"`, `"fp16"`)
            and the backward outside; an autocast that is active during this call counts, too.
        grad_clip: largest norm of the gradients, by `torch.nn.utils.clip_grad_norm_`.
        grad_scaler: a `torch.amp.GradScaler` scales the loss and makes the step.
        set_to_none: as in `optimizer.zero_grad`; `False` keeps the gradients between steps.
        zero_grad: whether gradients are reset `"after_step"` (before the next forward is the same)
            or only `"before_backward"`, so that the old ones are there during the forward.
        hold_output: how long the caller keeps the output: `True` or `"step"`, to the end of the
            step; `False`, only until the loss is made; `"backward"`, to the end of the backward;
            `"loop"`, into the next iteration, where the loop's names still refer to it.  The loss
            is kept as long, with `False` to the end of the backward.
        parallel: how the run is spread over ranks; the loop is then that of one rank.
        optimizer_in_backward: as for `planner.plan`: hooks of the parameters step the optimizer and
            free each gradient; nothing is left of the step behind the backward.

    Raises:
        CaptureError: the step cannot be traced; a sparse gradient with more than one micro-batch.
        PlanMismatch: the plan was made for another step.
        TypeError, ValueError: an argument is invalid by itself, such as an unknown optimizer.
    """
    dtype = Planning(loss_fn=loss_fn, gpu=gpu, accumulation=accumulation,
                     autocast=autocast).autocast_dtype
    loop = _loop(accumulation, set_to_none, zero_grad, hold_output)
    if grad_clip is not None:
        check_number("grad_clip", grad_clip, "a number (the largest norm)", "above 0",
                     lambda norm: norm > 0)
    if optimizer_in_backward:
        check_in_backward("eager", accumulation, parallel)
        if optimizer is None:
            raise ValueError("optimizer_in_backward=True: which optimizer steps is not given; "
                             'name it, as in optimizer="adamw"')
        if grad_clip is not None or grad_scaler:
            raise ValueError("optimizer_in_backward=True: a norm of all gradients, or their "
                             "scaling, needs all of them at once; leave grad_clip and grad_scaler "
                             "out")
    if parallel is not None and not check_parallel(parallel).is_replicated and accumulation > 1:
        raise ValueError(f"accumulation={accumulation}: gradients of shards that add up are not "
                         "followed through the loop; planner.plan(accumulation=…, parallel=…) "
                         "counts them")
    if plan is not None and plan.backend != "eager":
        raise ValueError(f"plan: the blocks of a plan for the backend {plan.backend!r} are not "
                         "known one by one; its own figures (peak_bytes, memory) are the breakdown")
    if optimizer is not None:
        optimizer_name(optimizer)  # a wrong name fails before the model is traced
    args, kwargs = split_inputs(model, inputs)
    with watched(progress, f"predicting the memory of {type(model).__name__}") as report:
        report("tracing the plain step")
        plain = PlainLoop(
            beneath_wrappers(model, parallel), args, kwargs, loss_fn=loss_fn,
            device=device_planned_for(model, device), gpu=gpu, probe=probe, autocast=dtype,
            grad_scaler=grad_scaler, holds_output=hold_output is not False,
            make_layout=None if parallel is None else (
                lambda fake_copy: layout_of(model, fake_copy, parallel)),
            in_backward_of=optimizer if optimizer_in_backward else None)
        plain.micro_batch()
        micro_batches: MicroBatches = plain.micro_batch
        if plan is not None:
            report("capturing the step that the plan is for")
            micro_batches = _planned(
                model, inputs, plan, plain, loss_fn=loss_fn, parallel=parallel,
                optimizer=optimizer if optimizer_in_backward else None,
                optimizer_in_backward=optimizer_in_backward)
        traced = None
        if optimizer is not None:
            report("tracing the optimizer's step")
            traced = plain.optimizer(optimizer, OptimizerSettings(
                grad_clip=grad_clip, grad_scaler=grad_scaler, set_to_none=set_to_none))
        resident = plain.resident()
        report("putting the step together")
        trace = compose(resident, micro_batches, traced, loop)
        breakdown = breakdown_of(trace)
        report("tracing the forward without gradients")
        inference = plain.inference()
        return MemoryReport(
            breakdown.loading, breakdown.first, breakdown.steady, breakdown.resident,
            trace=trace, loop=loop, device=str(plain.fake_copy.device),
            optimizer=None if traced is None else traced.name, planned=plan is not None,
            inference_peak_bytes=(sum(block.size_bytes for block in resident)
                                  + inference.peak_bytes),
            reserved_bytes=_reserved(trace, plain.fake_copy.device, plain.gpu),
            notes=(*plain.notes, *_notes_on(traced)))


def _reserved(trace: LoopTrace, device: torch.device, gpu: str | Gpu | None) -> int | None:
    if device.type != "cuda":
        return None
    return reserved_by(trace, held_workspace_bytes(device_model(device, gpu=gpu).gpu),
                       expandable=expandable_segments())


def _notes_on(traced: OptimizerTrace | None) -> tuple[str, ...]:
    notes = []
    if traced is not None and traced.own_copies:
        notes.append(
            f"{traced.own_copies} tensors that the optimizer updates are no parameters of the "
            "model: they count as its own copies (master weights); an optimizer made for another "
            "model looks the same")
    if traced is not None and traced.evaluations:
        later = len(traced.evaluations_from(traced.steady_begins))
        notes.append(
            f"a step of {traced.name} evaluates the model itself, taken to be {later} times: no "
            "iteration ends early; a later step is one whose state has grown to its full size")
    return tuple(notes)


def _planned(model: nn.Module, inputs: object, plan: Plan, plain: PlainLoop,
             **arguments: Any) -> MicroBatches:
    """The micro-batches of a plan; raises `PlanMismatch` where it was made for another step."""
    variant, timeline = capture_for(
        plan, model, inputs, device=plain.fake_copy.device, gpu=plain.gpu,
        autocast=plain.fake_copy.autocast, **arguments)
    names = plain.fake_copy.parameters.keys()
    return lambda with_gradient: planned_micro_batch(variant.graph, timeline, names, with_gradient)


def _loop(accumulation: int, set_to_none: bool, zero_grad: Any, hold_output: Any
          ) -> TrainingLoop:
    for name, value, known in (("zero_grad", zero_grad, _ZERO_GRAD),
                               ("hold_output", hold_output, _HOLD_OUTPUT)):
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}; known: {', '.join(map(str, known))}")
    return TrainingLoop(accumulation=accumulation, set_to_none=bool(set_to_none),
                        zero_grad=zero_grad,
                        hold_output={True: "step", False: "backward"}.get(hold_output, hold_output))
