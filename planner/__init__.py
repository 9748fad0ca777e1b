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
from planner.frontier import Frontier, frontier
from planner.plan import Plan
from planner.plan_file import load
from planner.verify import Verification, verify

__all__ = [
    "CaptureError",
    "Frontier",
    "InfeasibleBudget",
    "Plan",
    "PlanFileError",
    "PlanMismatch",
    "PlannerError",
    "Verification",
    "apply",
    "frontier",
    "load",
    "plan",
    "verify",
]
