"""`planner.plan`: check the arguments, capture the model, meet the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import nn

from planner._apply.call_signature import (
    autocast_words,
    differences,
    input_tensors,
    signature_of,
    tensor_keys,
)
from planner._graph_capture.capture import CapturedStep, SymbolicStep, capture_step, trace_symbolic
from planner._graph_capture.dynamo.blocks import REPEATED_BLOCKS, repeated_blocks
from planner._graph_capture.dynamo.traced_code import keep_code
from planner._graph_capture.fake_copies.fake import device_planned_for
from planner._graph_capture.module_forward import own_forward
from planner._graph_capture.optimizer.in_backward import EarlyGradients
from planner._graph_capture.plain_step.loss import LossFn
from planner.arguments.budget import Budget, parse_budget
from planner.arguments.inputs import describe_inputs, named_dimensions, split_inputs
from planner.arguments.planning import (
    MOST_CHUNKS,
    Dynamic,
    PlanArguments,
    Planning,
    takes_planning,
)
from planner.errors import CaptureError, InfeasibleBudget, PlanMismatch
from planner.plans.decisions import build_spec, schedule_of
from planner.plans.plan import Plan, summarize
from planner.progress import Progress, watched
from planner.search.agreement import agreed
from planner.search.planning import Effort, plan_within, told_in_percent, with_alternatives
from planner.search.variants import USUAL_TIME_LIMIT
from planner.solvers.simulator import Timeline, unroll
from planner.step.lowering import host_link
from planner.step.prepared import PreparedStep, prepare, sizes_of_variants, with_sizes
from planner.step.rank_layout import layout_of, regions_of_rank
from planner.step.variant import Variant
from planner.step.wrapped import beneath_wrappers, unwrapped, with_wrappers


@takes_planning()
def plan(model: nn.Module, inputs: object = None, *, budget_gb: float | None = None,
         budget: int | str | None = None, progress: Progress | None = None,
         **arguments: Unpack[PlanArguments]) -> Plan:
    """Plan one training step of `model`: keep or recompute each activation so that the peak memory
    stays within a budget, at the least extra time.

    The model is not executed: capture runs on fake tensors, allocates no activation and changes no
    parameter, buffer, gradient, mode or random state.

    Args:
        model: an `nn.Module` on any device, `meta` included.
        inputs: a tuple (positional), a mapping (keyword) or a tensor (the only argument); `None`:
            the model's own `example_input_array` or `dummy_inputs`.
        budget_gb: limit on the peak of the whole step in decimal gigabytes (1e9 bytes).
        budget: the same in bytes (`int`) or as text: `"8GB"`, `"8GiB"`, `"500MB"`, `"60%"` of the
            plain step's peak.  Without a budget, nothing is recomputed, unless the captured step
            would use more memory than the plain one.
        loss_fn: `loss_fn(output)` returns the scalar loss; `None`: `output.loss`,
            `output["loss"]`, a scalar output, else every differentiable output gets a cotangent.
        optimizer: instance, class or name (`"adamw"`), or a sequence of instances; its state and
            the temporaries of its step count as memory.
        solver: `"auto"`, or one of `solvers.SOLVERS`.
        backend: `"eager"`: the planned graph runs op by op and the predicted peak is exact;
            `"inductor"`: Inductor compiles it, and the predicted peak is that of its code.
        cost_model: the cost of recomputation. `"roofline"`: seconds, from FLOPs, bytes and the
            device's figures; `"measured"`: seconds of each op, run alone on dummy inputs on
            the device (cached on disk; estimated where the op cannot be run); for Inductor,
            `overhead` then comes from the seconds of each generated kernel, compiled for that;
            `"flops"`: FLOPs alone, and `overhead` is the fraction of FLOPs.
        device: the device to plan for; by default the model's, the CPU for a `meta` model.
        gpu: the GPU whose kernels are planned for if none is present, and whose figures time
            estimates use: a name such as `"H100"`, or a `planner.Gpu`; by default the present one;
            if there is none or it is not known, an A100, with a note in the plan.
        probe: measure the workspace of single ops if the device is present.
        time_limit: seconds for planning; soft.  Planning stops earlier, by counted work, when more
            search is not worth it; above the default it searches until the limit.  The time of
            capture is subtracted from the solver's share, down to half of the limit.  With Inductor
            work is counted; the plan says so where the limit cut the search off.
        keep: names of modules (wildcards allowed) and ops whose results are always kept.
        accumulation: micro-batches to each step of the optimizer, `inputs` being those of one: from
            the second on, the gradients of those before are there from the start.
        regions: what is compiled as a unit. `"model"`: all of it. `"blocks"`: each of its
            repeated blocks by itself, and what stands around them in regions of its own, with one
            budget over all, which leaves blocks in place for wrappers. Names of modules, wildcards
            allowed, are such blocks. `"auto"`, or `None`: the model for one device; blocks with
            `parallel`, and where `torch.compile` breaks the model's graph in a loop.
        autocast: forward and loss run within `torch.autocast` to this dtype (`"bf16"`, `"fp16"`),
            the backward outside; the applied model is to be called so, too.  An autocast that is
            active at the time of the call counts as well.
        hold_output: True if the caller keeps the model's output (logits) until the backward ends;
            False if it keeps only the loss, as trainers do and `loss = model(**batch).loss` does.
        parallel: how the run is spread over ranks; the budget is then that of one rank.  Buckets
            count as buffers, whole parameters as parameters while they are gathered, buffers of
            collectives as temporaries.  The plan is applied before the model is wrapped.  In a
            process group one rank makes the plan, and all that ask for the same take it.
        allow: choices beyond recomputation, one or a sequence. `"chunk"`: the widest part of the
            step whose ops act on rows of batch and sequence - a language model's loss head - may
            run a chunk at a time, forward and backward together where the loss allows; sums over
            rows are then sums of sums, which rounds otherwise.  `"offload"` (experimental, for
            GPUs): what the forward saves may be stored in pinned memory of the
            host and fetched back, beside the ops, where that takes less time than computing it
            again.
        budget_of: what the budget limits: `"allocated"` memory, the plan's `peak_bytes`; or, on a
            GPU, what torch's allocator has `"reserved"` of the device for it, which decides whether
            a run dies: `reserved_bytes`, by a model of the allocator, with expandable segments
            where the environment asks for them.  A percentage is then of what the plain step
            reserves.
        dynamic: sizes of the inputs that vary, by name: `{"input_ids": {0: "batch", 1: "length"},
            "labels": {0: "batch", 1: "length"}}`; every input that has such a size is to be named.
            `True` names all dimensions (`input_ids_0`).  The sizes of `inputs` are the largest that
            the plan serves: give the largest batch.  One graph with symbolic sizes is captured, the
            plan is made for the largest sizes and serves every size within `plan.ranges`, whose
            peak `plan.peak_bytes_at(batch=2, length=100)` tells.  For the eager backend and one
            device, the whole model as one graph.
        optimizer_in_backward: each gradient is used and freed as soon as it is whole, by a hook of
            its parameter that steps `optimizer` (`register_post_accumulate_grad_hook`).  The
            repeated blocks of the model are then compiled one by one by default, since one graph
            hands over all of its gradients at its end.
        progress: called with one line of text now and then; by default a line on stderr if that is
            a terminal, else a line in the log `planner.progress` after a second and one at the
            end, printed where logging is not set up.

    Raises:
        InfeasibleBudget: no plan fits; names the smallest feasible budget, the memory at that
            peak, and what would fit if the plan were allowed more (`alternatives`).
        CaptureError: the step cannot be captured.
        TypeError, ValueError: an argument is invalid by itself.
    """
    return plan_step(model, inputs, parse_budget(budget_gb, budget), Planning.of(plan, arguments),
                     progress)


def plan_step(model: nn.Module, inputs: object, limit: Budget | None, planning: Planning,
              progress: Progress | None = None, *,
              on_refusal: Callable[[InfeasibleBudget], object] | None = None) -> Plan:
    """Like `plan`, with checked arguments.  With `on_refusal`, a budget that cannot be met is given
    to it, and the plan is that of the smallest budget."""
    started = time.monotonic()
    with watched(progress, f"planning a training step of {_kind(model)}") as report:
        step, planning, lowered = _captured(model, inputs, planning, report, keeps_code=True)
        prepared = lowered(step, planning)
        time_limit = planning.time_limit
        left = 0.9 * time_limit - (time.monotonic() - started)
        effort = Effort(solver=planning.solver, time_limit=max(left, time_limit / 2),
                        work_limit=time_limit, is_thorough=time_limit > USUAL_TIME_LIMIT,
                        progress=report)
        limit_bytes = None if limit is None else limit.resolve(prepared.plain_bytes)

        def within(limit_bytes: int | None) -> Plan:
            if prepared.parallel is None:
                return plan_within(prepared, limit_bytes, effort)
            return agreed(lambda: plan_within(prepared, limit_bytes, effort), prepared,
                          limit_bytes, effort)

        with told_in_percent(limit, prepared.plain_bytes):
            try:
                made = within(limit_bytes)
            except InfeasibleBudget as refusal:
                if on_refusal is not None:
                    on_refusal(refusal)
                    made = within(refusal.minimum_bytes)
                elif prepared.parallel is not None:
                    raise
                else:
                    raise with_alternatives(
                        refusal, planning, prepared, lambda wider: lowered(replace(
                            step, variants=(step.variants[0], *step.chunked(MOST_CHUNKS))), wider),
                    ) from None
        report.conclude(f": {summarize(made)}")
        keep_code(unwrapped(model), step.code)
        return made


@takes_planning()
def capture(model: nn.Module, inputs: object = None, *, progress: Progress | None = None,
            **arguments: Unpack[PlanArguments]) -> PreparedStep:
    """Capture one training step of `model`, to be planned under any number of budgets.

    Arguments and errors are those of `plan`.
    """
    return prepare_step(model, inputs, Planning.of(capture, arguments), progress)


def capture_for(plan: Plan, model: nn.Module, inputs: object, **arguments: Any
                ) -> tuple[Variant, Timeline]:
    """Capture a step again in the graph variant of `plan`; return that variant and the plan's
    timeline.

    `arguments`: those of `capture` that the plan does not store.  Raises `PlanMismatch` if the plan
    was made for another step.
    """
    spec = plan.spec
    dynamic: dict[str, dict[int, str]] = {}
    for each in () if spec.sizes is None else spec.sizes.dimensions:
        dynamic.setdefault(each.input, {})[each.dimension] = each.size
    prepared = capture(model, inputs, cost_model=plan.cost_model, regions=spec.blocks or "model",
                       hold_output=spec.holds_output, dynamic=dynamic, **arguments)
    if plan.link is not None:
        prepared = prepared.with_link(plan.link)
    variant = prepared.variant_of(spec)
    timeline = unroll(variant.problem, schedule_of(variant, spec))
    if build_spec(prepared, variant, timeline).regions != spec.regions:
        words = [] if prepared.signature is None else differences(spec, model, prepared.signature)
        why = ", ".join(words) or "its graph, blocks or ranks differ"
        raise PlanMismatch(f"the plan was made for another step: {why}; plan this model with these "
                           "inputs anew")
    return variant, timeline


@dataclass(slots=True)
class SymbolicTrace:
    """The graph of a model with symbolic sizes, for steps of several sizes."""

    dimensions: Mapping[str, Mapping[int, str]]
    """Names of the sizes that vary."""
    step: SymbolicStep | None = None
    """A step of some size; `None` until there is one."""
    has_failed: bool = False
    """True if the model cannot be captured so."""


def prepare_step(model: nn.Module, inputs: object, planning: Planning,
                 progress: Progress | None, trace: SymbolicTrace | None = None) -> PreparedStep:
    """Like `capture`, with checked arguments.  With `trace` the graph with symbolic sizes is
    captured once, and taken where it serves."""
    step, planning, lowered = _captured(model, inputs, planning, progress, trace)
    return lowered(step, planning)


def _captured(model: nn.Module, inputs: object, planning: Planning, progress: Progress | None,
              trace: SymbolicTrace | None = None, *, keeps_code: bool = False
              ) -> tuple[CapturedStep, Planning,
                         Callable[[CapturedStep, Planning], PreparedStep]]:
    """The captured step, the arguments with what wrappers around the model say, and the function
    that prepares the step, or one with other variants, to be planned.  `keeps_code`: as for
    `capture_step`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_kind(model)}; "
                        "a factory must be called first")
    args, kwargs = split_inputs(model, inputs)
    planning = with_wrappers(model, planning)
    model = unwrapped(model)
    symbolic = None if trace is None or trace.step is None else trace.step.at(
        input_tensors(model, own_forward(model), args, kwargs))
    step = capture_call(model, args, kwargs, planning, progress, symbolic=symbolic,
                        keeps_code=keeps_code)
    dynamic = planning.dynamic if trace is None else None if trace.step else trace.dimensions
    if dynamic:
        try:
            symbolic = symbolic_step(step, model, args, kwargs, dynamic, progress)
        except CaptureError:
            if trace is None:
                raise
            trace.has_failed = True
        else:
            step = capture_call(model, args, kwargs, planning, progress, symbolic=symbolic)
            if trace is not None:
                trace.step = symbolic
    signature = signature_of(model, own_forward(model), args, kwargs)
    if planning.autocast_dtype is not None:
        signature = replace(signature, autocast=autocast_words(
            {torch.device(step.graph.device).type: planning.autocast_dtype}))

    def lowered(step: CapturedStep, planning: Planning) -> PreparedStep:
        prepared = prepare(
            step, tensors=tensor_keys(model), inputs=describe_inputs(args, kwargs),
            signature=signature, backend=planning.backend, cost_model=planning.cost_model,
            accumulation=planning.accumulation, parallel=planning.parallel,
            budget_of=planning.budget_of)
        if symbolic is not None:
            prepared = with_sizes(prepared, sizes_of_variants(prepared, symbolic))
        link = host_link(planning, step.graph.device)
        return prepared if link is None else prepared.with_link(link)

    return step, planning, lowered


def symbolic_step(step: CapturedStep, model: nn.Module, args: tuple[Any, ...],
                  kwargs: dict[str, Any], dynamic: Dynamic, progress: Progress | None = None
                  ) -> SymbolicStep:
    """The captured step `model(*args, **kwargs)` with the symbols that `dynamic` asks for; raises
    `CaptureError`."""
    if progress is not None:
        progress("capturing the step with symbolic sizes")
    named = named_dimensions(dynamic, input_tensors(model, own_forward(model), args, kwargs))
    symbolic = trace_symbolic(
        step, lambda fake: input_tensors(model, own_forward(model), fake.args, fake.kwargs), named)
    wanted = {size for places in named.values() for size in places.values()}
    fixed = sorted(wanted - symbolic.region.smallest.keys())
    if isinstance(dynamic, Mapping) and fixed:
        raise CaptureError(
            f"the model's code fixes {', '.join(fixed)} at the size of these inputs; take it out "
            "of dynamic, or name the same size in all inputs that have it")
    return symbolic


def capture_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
                 planning: Planning, progress: Progress | None, *,
                 unknown_loss: LossFn | None = None, early: EarlyGradients | None = None,
                 **more: Any) -> CapturedStep:
    """The step whose forward is `model(*args, **kwargs)`; `unknown_loss`: what stands for a loss
    that was not given; `early`: gradients that its loop uses and frees as they come; `more`:
    arguments of `capture_step` that are none of planning."""
    parallel, regions = planning.parallel, planning.regions
    if parallel is not None:
        regions = regions_of_rank(model, parallel, planning.regions)
    elif regions is None and (early or planning.optimizer_in_backward):
        regions = REPEATED_BLOCKS if repeated_blocks(model) else None
    device = device_planned_for(model, planning.device)
    if planning.budget_of == "reserved" and device.type != "cuda":
        raise ValueError(f'budget_of="reserved" on the device `{device}`: its allocator reserves '
                         "nothing beyond what is allocated; plan for device=\"cuda\", or leave "
                         "budget_of out")
    return capture_step(
        beneath_wrappers(model, parallel),
        args,
        kwargs,
        loss_fn=planning.loss_fn or unknown_loss,
        device=device,
        gpu=planning.gpu,
        keep=tuple(planning.keep),
        backend=planning.backend,
        cost_model=planning.cost_model,
        probe=planning.probe,
        optimizer=planning.optimizer,
        accumulated=planning.accumulation > 1,
        regions=regions,
        autocast=planning.autocast_dtype,
        holds_output=planning.hold_output,
        make_layout=None
        if parallel is None
        else lambda fake_copy: layout_of(model, fake_copy, parallel),
        progress=progress,
        chunks=planning.chunks,
        early=early,
        optimizer_in_backward=planning.optimizer_in_backward,
        **more,
    )


def _kind(value: object) -> str:
    return value.__name__ + " (a class)" if isinstance(value, type) else type(value).__name__
