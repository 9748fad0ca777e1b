"""Apply a plan to a model; the package `apply` does the work.

A mismatch between the model and the plan shows partly at once (parameters, buffers) and partly when
the first step captures the graph; both raise `PlanMismatch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from planner._apply.errors import PlanMismatch
from planner._apply.planned_forward import CountingForward, apply_spec
from planner._apply.planned_forward import StepCounts as StepCounts
from planner._apply.rewrite_spec import RewriteSpec
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.module_forward import forward_override
from planner._graph_capture.torch_compat import storage_key
from planner.arguments.inputs import join_inputs
from planner.step.wrapped import other_ranks, unwrapped

if TYPE_CHECKING:
    from planner.plans.plan import Plan


def apply(model: nn.Module, plan: Plan, *,
          replan: Callable[[nn.Module, Any], Plan] | None = None) -> nn.Module:
    """Return a model that trains under `plan`.

    Its inputs and outputs are those of `model`; it shares parameters and buffers, has the same
    `state_dict` keys and follows `train()`, `eval()` and `no_grad`.  Gradients, buffers and random
    state after a step equal those of `model`.

    A plan serves the inputs that it was made for, and others whose step has the same graph with no
    tensor larger: a smaller batch, a shorter sequence; each is traced anew.  A plan made with
    `dynamic` serves every size within `plan.ranges`, and is traced once.  Any other step
    raises `PlanMismatch` with the first difference, or, if `replan` is given, runs under a new
    plan:

        plan.apply(model, replan=lambda model, inputs: planner.plan(model, inputs, budget="8GB"))

    `replan` is called with the model and its inputs, as `planner.plan` is, for a step that neither
    `plan` nor an earlier result of `replan` serves, and returns a plan.

    The plan stays with the model: through `copy.deepcopy`, `torch.save` and `torch.load`, in an
    average of the model, under a wrapper; through `model.forward(...)`, and in a compiled module
    that contains the model (its graph breaks there).  A step that does not run under the plan
    warns, once per reason; `steps_of` counts both.

    Before it runs, the plan's schedule is simulated on the graph that it states, and that graph is
    compared with the model's, op by op.

    Raises `PlanMismatch` if the plan was made for another graph (possibly only at the first step,
    when the graph is captured) or is inconsistent, and `TypeError` if an argument is not a model or
    a plan.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    spec = _spec_of("plan", plan)
    if replan is not None and not callable(replan):
        raise TypeError("replan must be a function of a model and its inputs that returns a "
                        f"planner.Plan, got {type(replan).__name__}")
    if unwrapped(model) is not model:
        raise PlanMismatch(
            f"the plan is for the {type(unwrapped(model)).__name__} inside of this "
            f"{type(model).__name__}: apply it before the model is wrapped, "
            "DistributedDataParallel(plan.apply(model)), or, in place, "
            "planner.within(model, plan=plan)")
    why = other_ranks(plan.parallel, model)
    if why:
        raise PlanMismatch(why)
    applied = apply_spec(model, spec, replan=None if replan is None else _specs(replan))
    _check_resident(model, plan)
    return applied


def steps_of(model: nn.Module) -> StepCounts:
    """The number of steps of `model` that ran under its plan, and why the last other step did not.

    `model`: the result of applying a plan, or a module that contains it (a wrapper for distributed
    training, an average).  A step is a call with gradients enabled.  The result is updated by later
    steps.

    Raises `ValueError` if no plan was applied to any module of `model`.
    """
    for module in model.modules():
        found = forward_override(module)
        if isinstance(found, CountingForward):
            return found.steps
    raise ValueError(f"{type(model).__name__} has no plan: pass what plan.apply(model) returned, "
                     "or a module that holds it")


def _specs(
    replan: Callable[[nn.Module, Any], Plan],
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], RewriteSpec]:
    """Adapt the user's function to the signature that the applier calls."""
    def make(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RewriteSpec:
        return _spec_of("the result of replan",
                        replan(model, join_inputs(model, args, kwargs)))

    return make


def _spec_of(what: str, plan: object) -> RewriteSpec:
    spec = getattr(plan, "spec", None)
    if not isinstance(spec, RewriteSpec):
        raise TypeError(f"{what} must be a planner.Plan, got {type(plan).__name__}; "
                        "planner.load(path) reads one from a file")
    plan.check()  # type: ignore[attr-defined]
    return plan.sized_spec  # type: ignore[attr-defined,no-any-return]


def _check_resident(model: nn.Module, plan: Plan) -> None:
    """Raise `PlanMismatch` if the model's state is larger than the plan counts, or if its forward
    lacks an argument that the plan passes."""
    if plan.parallel is None:
        held, stated = _state_bytes(model), (
            plan.resident.parameters_bytes + plan.resident.buffers_bytes)
        if held > stated:
            raise PlanMismatch(f"the parameters and buffers of this model take {held:,} bytes, "
                               f"the plan counts on {stated:,}; plan this model anew")
    accepted = inspect.signature(model.forward).parameters
    for name, _ in plan.spec.overrides:
        if name not in accepted:
            raise PlanMismatch(f"the plan calls the model with {name!r}, which its forward does "
                               "not take; plan this model anew")


def _state_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, each storage once, limited to the part they
    use."""
    storages: dict[int, list[int]] = {}
    for tensor in strided_tensors([*model.parameters(), *model.buffers()]):
        storages.setdefault(storage_key(tensor), [tensor.untyped_storage().nbytes(), 0])[1] += (
            tensor.numel() * tensor.element_size())
    return sum(map(min, storages.values()))
