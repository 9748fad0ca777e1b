"""Applying a plan to a model; the work itself is done by the package `apply`.

Whether the graph is the plan's shows partly at once (parameters, buffers) and partly when the first
step captures it; both raise `PlanMismatch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner._apply.errors import PlanMismatch
from planner._apply.rewrite_spec import RewriteSpec
from planner._apply.step_counts import StepCounts as StepCounts

if TYPE_CHECKING:
    from torch import nn

    from planner.plans.plan import Plan


def apply(model: nn.Module, plan: Plan, *,
          replan: Callable[[nn.Module, Any], Plan] | None = None) -> nn.Module:
    """A model that trains as `plan` says.

    It takes and returns what `model` does, shares its parameters and buffers, has the same
    `state_dict` keys and follows `train()`, `eval()` and `no_grad`.  Gradients, buffers and the
    state of the random generators after a step are those of `model`.

    A plan serves the inputs that it was made with, and others whose step is the same graph with no
    tensor larger: a smaller batch, a shorter sequence.  Any other step raises `PlanMismatch`, which
    names the first difference, or, where `replan` is given, runs the plan that it makes:

        plan.apply(model, replan=lambda model, inputs: planner.plan(model, inputs, budget="8GB"))

    `replan` is called for a step that neither `plan` nor what it made before serves, with the model
    and the inputs as `plan` takes them, and returns a plan.

    The plan stays where the model goes: through `copy.deepcopy`, `torch.save` and `torch.load`,
    into an average of the model, under a wrapper; `model.forward(...)` runs it too, and so does a
    module that contains the model and is compiled (its graph breaks there).  A step that does not
    run under the plan says why, once for each reason; `steps_of` counts both.

    Before it runs, the plan's schedule is simulated on the graph that it states, and that is
    compared with the graph of the model, op by op.

    Raises `PlanMismatch` where the plan was made for another graph (possibly only at the first
    step, when the graph is seen) or is none that follows from its graph, and `TypeError` where the
    arguments are no model and no plan.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    spec = _spec_of("plan", plan)
    if replan is not None and not callable(replan):
        raise TypeError("replan must be a function of a model and its inputs that returns a "
                        f"planner.Plan, got {type(replan).__name__}")
    from planner._apply.runtime import apply_spec
    from planner.step.wrapped import other_ranks, unwrapped

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
    """How many steps of `model` ran under its plan, and why the last of the others did not.

    `model`: what a plan was applied to, or a module that holds it (a wrapper for training on many
    devices, an average).  A step is a call with gradients switched on.  The counts go on.

    Raises `ValueError` where no plan was applied to any module of `model`.
    """
    from planner._apply.planned_forward import CountingForward
    from planner._graph_capture.module_forward import forward_override

    for module in model.modules():
        found = forward_override(module)
        if isinstance(found, CountingForward):
            return found.steps
    raise ValueError(f"{type(model).__name__} has no plan: pass what plan.apply(model) returned, "
                     "or a module that holds it")


def _specs(
    replan: Callable[[nn.Module, Any], Plan],
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], RewriteSpec]:
    """The user's function as the applier calls it."""
    from planner.arguments.inputs import join_inputs

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
    return spec


def _check_resident(model: nn.Module, plan: Plan) -> None:
    """Raise `PlanMismatch` where the model holds more than the plan counts on, or has no argument
    that the plan gives its forward."""
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
    """Bytes of a model's parameters and buffers, each storage once, as far as they fill it."""
    from planner._graph_capture.memory.sparse import strided_tensors
    from planner._graph_capture.torch_compat import storage_key

    storages: dict[int, list[int]] = {}
    for tensor in strided_tensors([*model.parameters(), *model.buffers()]):
        storages.setdefault(storage_key(tensor), [tensor.untyped_storage().nbytes(), 0])[1] += (
            tensor.numel() * tensor.element_size())
    return sum(map(min, storages.values()))
