"""Plan which activations of a PyTorch training step to keep and which to recompute.

    plan = planner.plan(model, inputs, budget="8GB", optimizer="adamw")
    model = plan.apply(model)

Everything public is here; `graph_capture`, `solvers` and `apply` are how it is done.
"""

from planner.advice import Advice, advise
from planner.api import plan
from planner.applying import apply
from planner.batch_size import LargestSize, max_batch_size, max_sequence_length
from planner.data_parallel import DataParallel, RankMemory, data_parallel
from planner.errors import (
    CaptureError,
    InfeasibleBudget,
    PlanFileError,
    PlanMismatch,
    PlannerError,
)
from planner.frontier import Frontier, frontier
from planner.memory import memory
from planner.memory_report import MemoryReport
from planner.plan import Plan
from planner.plan_file import load
from planner.verify import Verification, verify

__all__ = [
    "Advice",
    "CaptureError",
    "DataParallel",
    "Frontier",
    "InfeasibleBudget",
    "LargestSize",
    "MemoryReport",
    "Plan",
    "PlanFileError",
    "PlanMismatch",
    "PlannerError",
    "RankMemory",
    "Verification",
    "advise",
    "apply",
    "data_parallel",
    "frontier",
    "load",
    "max_batch_size",
    "max_sequence_length",
    "memory",
    "plan",
    "verify",
]
