"""Applying a plan to a model; the work itself is done by the package `apply`.

Whether the graph is the plan's shows partly at once (parameters, buffers) and partly when the first
step captures it; both raise `PlanMismatch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.errors import PlanMismatch
from planner.plan import Plan

if TYPE_CHECKING:
    from torch import nn


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """A model that trains as `plan` says.

    It takes and returns what `model` does, shares its parameters and buffers, has the same
    `state_dict` keys and follows `train()`, `eval()` and `no_grad`.  Gradients, buffers and the
    state of the random generators after a step are those of `model`.

    Raises `PlanMismatch`, which names the first difference, where the plan was made for another
    graph (possibly only at the first step, when the graph is seen), and `TypeError` where the
    arguments are no model and no plan.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a planner.Plan, got {type(plan).__name__}; "
                        "planner.load(path) reads one from a file")
    from apply.runtime import apply_recipe

    return apply_recipe(model, plan.recipe, mismatch=PlanMismatch)
