"""The public names of `planner`, which hands them on."""

from planner.api import plan
from planner.attached.within import plan_of, within
from planner.errors import (
    CaptureError,
    InfeasibleBudget,
    PlanFileError,
    PlanMismatch,
    PlannerError,
)
from planner.plans.file import load
from planner.plans.plan import Plan
from planner.ranks.data_parallel import DataParallel, RankMemory, data_parallel
from planner.running.applying import apply
from planner.running.verify import Verification, verify
from planner.sizes.advice import Advice, advise
from planner.sizes.batch_size import LargestSize, max_batch_size, max_sequence_length
from planner.sizes.frontier import Frontier, frontier
from planner.training_loop.memory import memory
from planner.training_loop.report import MemoryReport

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
    "plan_of",
    "verify",
    "within",
]
