"""Rematerialization as a scheduling problem, without torch.

>>> problem = load_problem("resnet50_b256.json")
>>> result = solve(problem, budget_bytes)
>>> peak, cost = simulate(problem, result.schedule)
"""

from solvers.actions import Action as Action
from solvers.actions import Fetch as Fetch
from solvers.actions import Release as Release
from solvers.actions import Run as Run
from solvers.actions import Schedule as Schedule
from solvers.actions import Store as Store
from solvers.errors import IllegalSchedule as IllegalSchedule
from solvers.errors import InfeasibleBudget as InfeasibleBudget
from solvers.instances import load_problem as load_problem
from solvers.problem import Link as Link
from solvers.problem import Op as Op
from solvers.problem import Problem as Problem
from solvers.problem import Segment as Segment
from solvers.problem import Storage as Storage
from solvers.result import Result as Result
from solvers.simulator import simulate as simulate
from solvers.simulator import unroll as unroll
from solvers.solve import ALGORITHMS
from solvers.solve import solve as solve
from solvers.task import Algorithm as Algorithm
from solvers.task import Proposal as Proposal
from solvers.task import Task as Task

SOLVERS = tuple(ALGORITHMS)
"""Names of the available solvers; `solve` takes any other `Algorithm` as well."""
