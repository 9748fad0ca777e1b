"""The public names of `planner`, which re-exports them."""

from planner._graph_capture.op_costs.devices import Gpu as Gpu
from planner.api import plan as plan
from planner.arguments.parallel import DataParallel as DataParallel
from planner.attached.status import Status as Status
from planner.attached.within import plan_of as plan_of
from planner.attached.within import status as status
from planner.attached.within import within as within
from planner.errors import CaptureError as CaptureError
from planner.errors import InfeasibleBudget as InfeasibleBudget
from planner.errors import PlanFileError as PlanFileError
from planner.errors import PlanMismatch as PlanMismatch
from planner.errors import PlannerError as PlannerError
from planner.errors import UnsupportedTorch as UnsupportedTorch
from planner.plans.file import load as load
from planner.plans.plan import Plan as Plan
from planner.ranks.data_parallel import RankMemory as RankMemory
from planner.ranks.data_parallel import data_parallel as data_parallel
from planner.running.applying import StepCounts as StepCounts
from planner.running.applying import apply as apply
from planner.running.applying import steps_of as steps_of
from planner.running.verify import Verification as Verification
from planner.running.verify import verify as verify
from planner.sizes.advice import Advice as Advice
from planner.sizes.advice import advise as advise
from planner.sizes.batch_size import LargestSize as LargestSize
from planner.sizes.batch_size import max_batch_size as max_batch_size
from planner.sizes.batch_size import max_sequence_length as max_sequence_length
from planner.sizes.frontier import Frontier as Frontier
from planner.sizes.frontier import frontier as frontier
from planner.training_loop.memory import memory as memory
from planner.training_loop.report import MemoryReport as MemoryReport

__all__ = sorted(name for name in globals() if not name.startswith("_"))
