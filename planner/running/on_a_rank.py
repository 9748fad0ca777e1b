"""The two steps that `verify` compares, for a model wrapped for many ranks.

Nothing is copied, since wrappers keep references to the model: the model's forward is replaced by
the plan's during a planned step, and by the original one during a plain step, whatever plan the
model has already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner.errors import PlanMismatch

if TYPE_CHECKING:
    from torch import nn

    from planner.arguments.parallel import DataParallel
    from planner.plans.plan import Plan

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
    from planner._apply.blocks import code_of, run_step
    from planner._graph_capture.module_forward import (
        ForwardOverride,
        forward_override,
        in_place_of_forward,
        own_forward,
    )
    from planner.step.wrapped import other_ranks, unwrapped

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
        vars(target).get("forward"), ForwardOverride
    ):
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
