"""Plan which activations of a PyTorch training step to keep and which to recompute.

    plan = planner.plan(model, inputs, budget="8GB", optimizer="adamw")
    model = plan.apply(model)

Everything public is here; `graph_capture`, `solvers` and `apply` are how it is done.
"""

from planner.api import plan
from planner.applying import apply
from planner.errors import (
    CaptureError,
    InfeasibleBudget,
    PlanFileError,
    PlanMismatch,
    PlannerError,
)
from planner.plan import Plan
from planner.plan_file import load

__all__ = [
    "CaptureError",
    "InfeasibleBudget",
    "Plan",
    "PlanFileError",
    "PlanMismatch",
    "PlannerError",
    "apply",
    "load",
    "plan",
]
