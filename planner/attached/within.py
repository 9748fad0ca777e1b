"""`planner.within`: a model that keeps its training steps within a budget, in any loop.

    model = planner.within(model, budget="8GB")
    # ... and train it as before.

It works in place, like `nn.Module.compile`, and so applies in any owner of the model - a trainer,
accelerate, DistributedDataParallel - wrapped around it before or after.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, TypeVar, Unpack

from torch import nn

from planner._graph_capture.module_forward import (
    forward_override,
    modules_of,
    overrides,
    own_forward,
    set_forward,
    take_down,
)
from planner._graph_capture.torch_compat import is_compiled
from planner.arguments.budget import parse_budget
from planner.arguments.planning import PlanArguments, Planning, takes_planning
from planner.attached.forward import PlanningForward
from planner.attached.methods import check_methods, plan_methods, planned_methods
from planner.attached.observing import ObservingForward, OnNew, Settings
from planner.attached.status import Status
from planner.plans.file import load
from planner.plans.plan import Plan

log = logging.getLogger("planner")

M = TypeVar("M", bound=nn.Module)


@takes_planning(without=("autocast",))
def within(model: M, budget: int | str | None = None, *, budget_gb: float | None = None,
           on_new: OnNew = "replan", plan: Plan | str | PathLike[str] | None = None,
           methods: Sequence[str] = ("forward",), **arguments: Unpack[PlanArguments]) -> M:
    """Train `model` within a budget: the same model, changed in place.

    The first training step is planned from its actual call - arguments, autocast, mode and frozen
    parameters - before it runs, and stays within the budget itself.  Later steps of the same or a
    smaller size run under the same plan; a larger step, or another graph (a layer frozen, a branch
    taken), is planned when it comes.  Steps without gradients run unplanned.  Each plan is one line
    in the log `planner`; `planner.plan_of(model)` returns the current one.

    Memory outside the model is observed in the first step: the optimizer that steps (by a hook of
    torch's), gradients of earlier micro-batches, the caller's loss.  The first step therefore
    assumes the worst common case (or runs under the schedule with the lowest peak); the plan is
    remade once, before the second step.

    Args:
        model: an `nn.Module`, or a wrapper of torch's or accelerate's around one.
        budget, budget_gb: as for `planner.plan`; a percentage is of the peak of the plain step.
        regions: as for `planner.plan`; `None`: the whole model, or its repeated blocks: where 24 or
            more of them are equal, so that the first step takes less time, and where the model is
            wrapped by DistributedDataParallel or fully_shard, so that communication overlaps with
            the backward.
        parallel: as for `planner.plan`; `None`: what the wrappers of the model tell.
        on_new: what a step that no plan serves does: `"replan"`: it is planned; `"refuse"`: it
            raises `PlanMismatch`.
        plan: a saved plan, or its path, which is taken instead of planning where it fits.
        methods: names of the methods that are trained: `("forward", "encode")`.  Where the model is
            trained by another method and only the forward was named, its second step shows which,
            and it is planned from the third on.
        dynamic: sizes that are symbolic from the first step on, as for `planner.plan`; by default
            those that a later step changes, and those marked by `torch._dynamo.mark_dynamic`.
        **arguments: as for `planner.plan`, except `autocast`, which is observed.  `optimizer`,
            `loss_fn`, `accumulation` and `hold_output` are observed, too; if they are given, the
            first step already counts them.

    Calling it again replaces the earlier settings.  A training step raises `InfeasibleBudget` if no
    plan fits, and `CaptureError` if it cannot be captured, before it runs.
    """
    settings = settings_of(budget, budget_gb, on_new, plan, arguments)
    if isinstance(model, nn.Module):
        settings = replace(settings, methods=check_methods(_unwrapped(model), methods))
    attach(model, settings)
    return model


def settings_of(budget: int | str | None, budget_gb: float | None, on_new: OnNew,
                plan: Plan | str | PathLike[str] | None, arguments: PlanArguments) -> Settings:
    """The checked arguments of `within`."""
    limit = parse_budget(budget_gb, budget)
    planning = Planning.of(within, arguments).without_offload("planner.within")
    if on_new not in ("replan", "refuse"):
        raise ValueError(f'on_new must be "replan" or "refuse", got {on_new!r}')
    given = load(plan) if isinstance(plan, str | PathLike) else plan
    if given is not None and not isinstance(given, Plan):
        raise TypeError("plan must be a planner.Plan or the path of a saved one, got "
                        f"{type(given).__name__}")
    if given is not None:
        given.check()
    if given is not None and limit is not None and limit.size_bytes is not None:
        takes = given.reserved_bytes if planning.budget_of == "reserved" else given.peak_bytes
        if takes is None:
            raise ValueError("the plan that was given says nothing of what is reserved, which "
                             "the budget is of; plan anew, or leave it out")
        if takes > limit.size_bytes:
            raise ValueError(f"the plan that was given peaks at {takes:,} bytes, more than the "
                             f"budget of {limit.size_bytes:,} bytes; plan anew, or leave it out")
    return Settings(planning, limit, on_new, given)


def attach(model: nn.Module, settings: Settings) -> None:
    """Install the planning forward in the model, or change its settings."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; a factory "
                        "must be called first")
    target = _unwrapped(model)
    outer = next((each.__self__ for each in overrides() if isinstance(each, PlanningForward)
                  and not each.was_passed_by and each.__self__ is not target
                  and any(module is target for module in modules_of(each.__self__))), None)
    if outer is not None:
        raise ValueError(
            f"this {type(target).__name__} is a part of a {type(outer).__name__} that "
            "planner.within was called for, and which is planned as a whole: call it for one of "
            "the two only")
    if settings.planning.backend == "eager" and (is_compiled(model) or is_compiled(target)):
        log.warning(
            "%s is compiled (torch.compile): within the budget its steps run op by op, and what "
            'that compiler makes is not used; backend="inductor" compiles the planned step',
            type(target).__name__)
    standing, is_planned = forward_override(target), "forward" in settings.methods
    if is_planned and isinstance(standing, PlanningForward):
        standing.change(settings)
    else:
        take_down(target)
        if is_planned:
            set_forward(target, PlanningForward(target, own_forward(target), settings))
    plan_methods(target, tuple(name for name in settings.methods if name != "forward"), settings,
                 PlanningForward)


def attach_in_step(model: nn.Module, settings: Settings) -> None:
    """Like `attach`, in a step that has already called the model."""
    attach(model, settings)
    standing = _override(_unwrapped(model))
    assert standing is not None
    standing.begin_in_step()


def release_optimizer(model: nn.Module) -> None:
    """Let the plans of a model, whose training is over, hold no optimizer."""
    standing = _found(model)
    if isinstance(standing, PlanningForward):
        standing.release_optimizer()


def is_within(model: nn.Module) -> bool:
    """True if `within` was called for this model or for the module that it wraps."""
    return _override(_unwrapped(model)) is not None


def plan_of(model: nn.Module) -> Plan | None:
    """The plan of the last training step of `model`; `None` before the first step, and for a model
    that `within` was not called for.

    The model may be wrapped (DistributedDataParallel, accelerate, `torch.compile`), or contain the
    one that `within` was called for.
    """
    standing = _found(model)
    return None if standing is None else standing.status.plan


def status(model: nn.Module) -> Status:
    """Status of the training of `model` within its budget: the plan, steps and calls, how many of
    them ran under a plan and why others did not, the worst peak, and the time spent planning.

    `model`: as for `plan_of`.  Raises `ValueError` for a model that `within` was not called for.
    """
    standing = _found(model)
    if standing is None:
        raise ValueError(f"planner.within was not called for this {type(model).__name__}, nor for "
                         "a module of it: call planner.within(model, budget) first")
    return standing.status


def _found(model: nn.Module) -> ObservingForward | None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = (_override(module) for module in (_unwrapped(model), *_modules(model)))
    return next((standing for standing in found if standing is not None), None)


def _override(module: nn.Module) -> ObservingForward | None:
    found = forward_override(module)
    if isinstance(found, ObservingForward):
        return found
    return next((each.planning for each in planned_methods(module)), None)


_WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes in which wrappers keep their module."""
_WRAPPERS = ("OptimizedModule", "DistributedDataParallel", "DataParallel",
             "FullyShardedDataParallel", "CheckpointWrapper", "AveragedModel", "_FabricModule")


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside wrappers."""
    while type(model).__name__ in _WRAPPERS:
        inner: Any = next((getattr(model, name) for name in _WRAPPED if hasattr(model, name)), None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        yield _unwrapped(module)
