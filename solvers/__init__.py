"""Rematerialization as a scheduling problem, without torch.

>>> problem = load_problem("resnet50_b256.json")
>>> result = solve(problem, budget_bytes)
>>> peak, cost = simulate(problem, result.schedule)
"""

from planner.solvers.actions import Action as Action
from planner.solvers.actions import Fetch as Fetch
from planner.solvers.actions import Release as Release
from planner.solvers.actions import Run as Run
from planner.solvers.actions import Schedule as Schedule
from planner.solvers.actions import Store as Store
from planner.solvers.errors import IllegalSchedule as IllegalSchedule
from planner.solvers.errors import InfeasibleBudget as InfeasibleBudget
from planner.solvers.instances import load_problem as load_problem
from planner.solvers.problem import Link as Link
from planner.solvers.problem import Op as Op
from planner.solvers.problem import Problem as Problem
from planner.solvers.problem import Segment as Segment
from planner.solvers.problem import Storage as Storage
from planner.solvers.result import Result as Result
from planner.solvers.simulator import simulate as simulate
from planner.solvers.simulator import unroll as unroll
from planner.solvers.solve import ALGORITHMS
from planner.solvers.solve import solve as solve
from planner.solvers.task import Algorithm as Algorithm
from planner.solvers.task import Proposal as Proposal
from planner.solvers.task import Task as Task

SOLVERS = tuple(ALGORITHMS)
"""Names of the available solvers; `solve` takes any other `Algorithm` as well."""
