"""The public names of `planner`, which re-exports them."""

from planner._graph_capture.op_costs.devices import Gpu as Gpu
from planner.api import plan as plan
from planner.arguments.parallel import DataParallel as DataParallel
from planner.attached.status import Status as Status
from planner.attached.within import plan_of as plan_of, status as status, within as within
from planner.errors import (
    CaptureError as CaptureError,
    InfeasibleBudget as InfeasibleBudget,
    PlanFileError as PlanFileError,
    PlanMismatch as PlanMismatch,
    PlannerError as PlannerError,
    UnsupportedTorch as UnsupportedTorch,
)
from planner.plans.file import load as load
from planner.plans.plan import Plan as Plan
from planner.plans.selective import SelectiveCheckpointing as SelectiveCheckpointing
from planner.ranks.data_parallel import RankMemory as RankMemory, data_parallel as data_parallel
from planner.running.applying import StepCounts as StepCounts, apply as apply, steps_of as steps_of
from planner.running.verify import Verification as Verification, verify as verify
from planner.sizes.advice import Advice as Advice, advise as advise
from planner.sizes.batch_size import (
    LargestSize as LargestSize,
    max_batch_size as max_batch_size,
    max_sequence_length as max_sequence_length,
)
from planner.sizes.frontier import Frontier as Frontier, frontier as frontier
from planner.training_loop.memory import memory as memory
from planner.training_loop.report import MemoryReport as MemoryReport

__all__ = sorted(name for name in globals() if not name.startswith("_"))
