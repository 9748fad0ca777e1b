"""Verify a plan: run one plain and one planned training step, and compare them.

Both steps run on the user's model with the same inputs, buffers and random state.  Gradients,
buffers and random state are restored afterwards.  The peak is measured by the allocator during a
planned step, after one that compiles; resident memory and the optimizer, which do not run here, are
added as predicted.

In 16-bit floats, by autocast or by the model's own dtype, one op more or less that rounds changes
the third digit.  A planned step that differs from the plain one by more than the tolerance is there
compared with the step as torch captures it without a plan (the backend `aot_eager`) as well.
Inductor's fused kernels round in yet another way, which depends on what is recomputed: there the
tolerance is larger.

For a model wrapped for many ranks nothing is copied, since wrappers keep references to the model:
the model's forward is replaced by the plan's during a planned step, and by the original one during
a plain step, whatever plan the model has already.

Blind spots: a step with nondeterministic kernels differs from itself; state outside parameters,
buffers and torch's random generators is neither compared nor restored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from planner._apply.blocks import code_of, run_step
from planner._apply.call_signature import autocast_as_planned, input_tensors
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.model_state import ModelState
from planner._graph_capture.module_forward import (
    ForwardOverride,
    forward_override,
    in_place_of_forward,
    own_forward,
)
from planner._graph_capture.plain_step.loss import objective
from planner._graph_capture.torch_compat import pytree
from planner.arguments.inputs import split_inputs
from planner.errors import PlanMismatch
from planner.running.applying import apply, steps_of
from planner.step.wrapped import other_ranks, parallel_of, unwrapped

if TYPE_CHECKING:
    from planner.arguments.parallel import DataParallel
    from planner.plans.plan import Plan

GRADIENT_TOLERANCE = 1e-6
"""Largest relative L2 distance between two gradients that counts as equal: a captured graph
accumulates in another order than plain autograd."""

COMPILED_GRADIENT_TOLERANCE = 1e-5
"""The same for a plan that Inductor compiles: fused kernels round differently."""

COARSE_GRADIENT_TOLERANCE = 2.0 ** -7
"""The same in a 16-bit dtype for Inductor, for a plan that runs a part in chunks, whose sums round
differently, and for a rank of many, where the step is not captured for comparison."""

_NOISE = 10
"""On a GPU errors may be as many times larger than those between two plain steps, whose kernels may
add in any order."""

_MEASURED_ON_A_RANK = 3
"""Number of steps whose smallest peak counts: a thread of gloo may keep a copy of what it sends
into the next op."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of one plain and one planned step, both executed."""

    budget_bytes: int | None
    """The plan's budget; `None`: no limit."""
    predicted_peak_bytes: int
    """The plan's `peak_bytes`; for a range of sizes, that at the sizes of the inputs."""
    peak_bytes: int
    """Resident bytes plus the measured peak of forward, loss and backward of the planned step above
    them; the optimizer's step, if its peak is higher, as predicted."""
    max_gradient_error: float
    """Relative L2 distance of the whole gradient from that of the step without a plan, which in
    16-bit floats and on a GPU may be the captured one; infinite if only one step produced a
    gradient."""
    loss_error: float
    """Relative L2 distance of the loss."""
    buffers_equal: bool
    """True if every buffer is the same after both steps: integers exactly, others up to `tolerance`
    (a kernel may sum in another order if the captured graph uses another tensor layout)."""
    rng_equal: bool
    """True if every random generator is in the same state after both steps."""
    tolerance: float = GRADIENT_TOLERANCE
    """Limit on the errors; on a GPU at least 10 times the error between two plain steps."""
    why_unplanned: str | None = None
    """Reason why the step did not run under the plan; `None`: it did."""

    @property
    def ok(self) -> bool:
        """True if the planned step equals the plain one, within tolerance and budget."""
        return (self.why_unplanned is None and self.within_budget and self.rng_equal
                and self.buffers_equal
                and max(self.max_gradient_error, self.loss_error) <= self.tolerance)

    @property
    def within_budget(self) -> bool:
        """True if the measured peak is within the budget."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    def to_dict(self) -> dict[str, Any]:
        """The verification as JSON values; an infinite error is `null`."""
        return {
            "ok": self.ok,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "max_gradient_error": _finite(self.max_gradient_error),
            "loss_error": _finite(self.loss_error),
            "buffers_equal": self.buffers_equal,
            "rng_equal": self.rng_equal,
            "tolerance": self.tolerance,
            "why_unplanned": self.why_unplanned,
        }

    def __str__(self) -> str:
        from planner.reporters.table import plain_text, verification_report

        return plain_text(verification_report(self))


def verify(model: nn.Module, plan: Plan, inputs: object = None, *,
           loss_fn: Callable[[Any], torch.Tensor] | None = None) -> Verification:
    """Run one plain and one planned training step of `model` and compare them.

    `inputs` and `loss_fn` are those of the plan, with real values on the model's device; autocast
    is that of the plan.  The model is left unchanged.  For a plan for Inductor the plain step is
    that of `torch.compile(model)`, which draws the same random numbers.

    In distributed training every rank calls it, with its plan and with the model wrapped by
    `DistributedDataParallel` or `fully_shard`; each rank compares its own gradients and memory.
    The model may already have the plan, by `plan.apply` or `within`.

    Raises `PlanMismatch` if the plan was made for another graph or other ranks, `CaptureError` if
    nothing can be differentiated, and `ValueError` for a model without values (on `meta`) or if
    only one of model and plan is for a single device.
    """
    args, kwargs = split_inputs(model, inputs)
    device = _device_of(model)
    ranks = parallel_of(model)
    on_a_rank = ranks is not None or plan.parallel is not None
    reuses_gradients = ranks is not None and ranks.gradient_as_bucket_view
    unplanned, planned, why_unplanned = (
        steps_on_this_rank(model, ranks, plan) if on_a_rank else _steps_on_one_device(model, plan))
    if model.training != plan.spec.training:
        mode, now = ("train", "eval") if plan.spec.training else ("eval", "train")
        raise PlanMismatch(f"the plan was made in {mode} mode and the model is in {now} mode: "
                           f"call model.{mode}() first")

    def step(forward: Step) -> tuple[torch.Tensor, ...]:
        with autocast_as_planned(plan.spec):
            output = forward(*args, **kwargs)  # alive until the step ends, or as planned
            goal = objective(output, loss_fn)
        if not plan.spec.holds_output:
            del output
        goal.backward()
        return goal.roots

    tolerance = (GRADIENT_TOLERANCE if plan.backend == "eager" else COMPILED_GRADIENT_TOLERANCE)
    is_coarse = _is_coarse(model, plan)
    has_captured = not on_a_rank and plan.spec.chunks == 1 and plan.backend == "eager"
    if is_coarse and not has_captured:
        tolerance = COARSE_GRADIENT_TOLERANCE
    with _state_kept(model, args, kwargs, reuses_gradients) as restart:
        plain = _outcome(model, lambda: step(unplanned), reuses_gradients)
        restart()
        ours = _outcome(model, lambda: step(planned), reuses_gradients)
        is_on_gpu = device.type == "cuda"
        if is_on_gpu and not on_a_rank and (
                _relative_distance(plain.gradients, ours.gradients) > tolerance):
            restart()
            again = _outcome(model, lambda: step(unplanned), reuses_gradients)
            tolerance = max(tolerance,
                            _NOISE * _relative_distance(plain.gradients, again.gradients))
        peaks = []
        for _ in range(_MEASURED_ON_A_RANK if on_a_rank else 1):
            restart()
            peaks.append(record_peak(lambda: step(planned), device).peak_bytes)
        measured = min(peaks)
        if (is_coarse or is_on_gpu) and has_captured and (
                _relative_distance(plain.gradients, ours.gradients) > tolerance):
            restart()
            kwargs = {**dict(plan.spec.overrides), **kwargs}
            captured = _compiled(model, "aot_eager")
            plain = _outcome(model, lambda: step(captured))
    tensors, varied = input_tensors(model, own_forward(model), args, kwargs), plan.spec.sizes
    sizes = {} if varied is None else {
        each.size: tensors[each.input].size(each.dimension) for each in varied.dimensions}
    predicted = plan.peak_bytes_at(**sizes)
    return Verification(
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=predicted,
        peak_bytes=max(plan.resident_bytes_at(**sizes) + measured,
                       min(plan.optimizer_step_peak_bytes, predicted)),
        max_gradient_error=_relative_distance(plain.gradients, ours.gradients),
        loss_error=_relative_distance(plain.losses, ours.losses),
        buffers_equal=_all_close(plain.buffers, ours.buffers, tolerance),
        rng_equal=_all_close(plain.random_states, ours.random_states, 0.0),
        tolerance=tolerance,
        why_unplanned=why_unplanned(),
    )


def _steps_on_one_device(model: nn.Module, plan: Plan) -> Steps:
    planned = apply(model, plan)
    unplanned = model if plan.backend == "eager" else _compiled(model, "inductor")
    return unplanned, planned, lambda: steps_of(planned).last_reason


def _compiled(model: nn.Module, backend: str) -> nn.Module:
    """The model compiled by a torch backend, without a plan."""
    unplanned = copy.copy(model)
    unplanned.compile(backend=backend, dynamic=False)
    assert isinstance(unplanned, torch.nn.Module)
    return unplanned


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Results of a step."""

    losses: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    random_states: dict[str, torch.Tensor]


def _outcome(model: nn.Module, step: Callable[[], tuple[torch.Tensor, ...]],
             reuses_gradients: bool = False) -> _Outcome:
    losses = step()
    return _Outcome(
        losses={str(number): loss.detach().clone() for number, loss in enumerate(losses)},
        gradients={name: _kept(parameter.grad, reuses_gradients)
                   for name, parameter in model.named_parameters() if parameter.grad is not None},
        buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
        random_states=_random_states())


def _kept(gradient: torch.Tensor, reuses_gradients: bool) -> torch.Tensor:
    """The gradient, or its local shard; a copy if later steps reuse its memory."""
    here: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return here.clone() if reuses_gradients else here


@contextmanager
def _state_kept(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
                reuses_gradients: bool) -> Iterator[Callable[[], None]]:
    """Context that yields a function to reset the model: no gradients, and the buffers and random
    state of entry.  On exit the gradients are restored, too; `reuses_gradients`: every step writes
    to their memory."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs))
              if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    with_gradients = [*model.parameters(), *leaves]
    gradients = [tensor.grad for tensor in with_gradients]
    copies = [(each, each.clone()) for each in gradients if each is not None and reuses_gradients]
    restore = ModelState(model).restore

    def restart() -> None:
        for tensor in with_gradients:
            tensor.grad = None
        restore()

    restart()
    try:
        yield restart
    finally:
        restart()
        for reused, copy in copies:
            reused.copy_(copy)
        for tensor, gradient in zip(with_gradients, gradients, strict=True):
            tensor.grad = gradient


def _random_states() -> dict[str, torch.Tensor]:
    """State of every random generator of torch, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.update({f"cuda:{number}": state
                       for number, state in enumerate(torch.cuda.get_rng_state_all())})
    return states


def _relative_distance(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    if expected.keys() != found.keys():
        return float("inf")
    distance = size = 0.0
    for name, reference in expected.items():
        other = found[name]
        if reference.shape != other.shape:
            return float("inf")
        size += reference.double().square().sum().item()
        if not torch.equal(reference, other):
            distance += (reference.double() - other.double()).square().sum().item()
    if distance == 0.0:
        return 0.0
    return (distance / size) ** 0.5 if size else float("inf")


def _all_close(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor],
               tolerance: float) -> bool:
    if expected.keys() != found.keys():
        return False
    return all(
        _relative_distance({name: tensor}, {name: found[name]}) <= (
            tolerance if tensor.is_floating_point() else 0.0)
        for name, tensor in expected.items())


def _is_coarse(model: nn.Module, plan: Plan) -> bool:
    """True if a part of the step is computed in a dtype coarser than float32."""
    under, ranks = plan.spec.signature, plan.parallel
    return bool(under and under.autocast) or (
        ranks is not None and ranks.param_dtype not in (None, "fp32")) or any(
        tensor.dtype in (torch.bfloat16, torch.float16)
        for tensor in (*model.parameters(), *model.buffers()))


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(iter(model.parameters()), next(iter(model.buffers()), None))
    device = torch.device("cpu") if tensor is None else tensor.device
    if device.type == "meta":
        raise ValueError("verify runs real steps, and this model is on meta, without values: "
                         'build it on the device itself, or call model.to_empty(device="cpu")')
    return device


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


Step = Callable[..., Any]
"""The forward of a training step, a function of the model's arguments."""

Steps = tuple[Step, Step, Callable[[], str | None]]
"""A step without the plan, one with it, and a function that says why the last one ran unplanned."""

_REMEDY = (", where a step takes another memory: verify the plan of a rank in its run, on every "
           "rank, with the model as it is wrapped or sharded; or, before that, one that is made "
           'by regions="blocks" and without parallel')


def steps_on_this_rank(model: nn.Module, found: DataParallel | None, plan: Plan) -> Steps:
    """The two steps of a model whose data parallelism is `found` (`None`: a single device); at
    least one of plan and model is for many ranks.

    Raises `ValueError` if only one of model and plan is for a single device, and `PlanMismatch` if
    the plan is for another run.
    """
    planned_for = plan.parallel
    if planned_for is None:
        assert found is not None
        raise ValueError(f"this model is on one of {found.ranks} ranks, and the plan is for one "
                         f"device{_REMEDY}")
    if found is None:
        raise ValueError(f"the plan is for one of {planned_for.ranks} ranks under "
                         f"{planned_for.kind}, and this model is on one device{_REMEDY}")
    refusal = other_ranks(planned_for, model)
    if not refusal and planned_for.is_replicated != found.is_replicated:
        refusal = f"the plan is for {planned_for.kind}, and this model is wrapped by {found.kind}"
    if refusal:
        raise PlanMismatch(refusal)
    target = unwrapped(model)
    own, code = own_forward(target), code_of(target, plan.spec)
    if forward_override(target) is not None and not isinstance(
            vars(target).get("forward"), ForwardOverride):
        raise ValueError("something was wrapped around the planned forward of this model (as "
                         "accelerate does for mixed precision): verify before that")

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run_step(code, plan.spec, target, own, args, kwargs)

    def model_with(forward: Step | None) -> Step:
        def step(*args: Any, **kwargs: Any) -> Any:
            with in_place_of_forward(target, forward):
                return model(*args, **kwargs)

        return step

    return model_with(own), model_with(forward), code.why_unplanned
