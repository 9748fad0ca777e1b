"""Rematerialization as a scheduling problem, without torch.

>>> problem = load_problem("resnet50_b256.json")
>>> result = solve(problem, budget_bytes)
>>> peak, cost = simulate(problem, result.schedule)
"""

from solvers.errors import InfeasibleBudget as InfeasibleBudget
from solvers.instances import load_problem as load_problem
from solvers.problem import Op as Op
from solvers.problem import Problem as Problem
from solvers.problem import Schedule as Schedule
from solvers.problem import Segment as Segment
from solvers.problem import Storage as Storage
from solvers.result import Result as Result
from solvers.simulator import IllegalSchedule as IllegalSchedule
from solvers.simulator import simulate as simulate
from solvers.simulator import unroll as unroll
from solvers.solve import ALGORITHMS
from solvers.solve import solve as solve

SOLVERS = tuple(ALGORITHMS)
"""Names of the available solvers."""
