"""Rematerialization as a scheduling problem, without torch.

>>> problem = load_problem("resnet50_b256.json")
>>> result = solve(problem, budget_bytes)
>>> peak, cost = simulate(problem, result.schedule)
"""

from planner.solvers.actions import (
    Action as Action,
    Fetch as Fetch,
    Release as Release,
    Run as Run,
    Schedule as Schedule,
    Store as Store,
)
from planner.solvers.errors import (
    IllegalSchedule as IllegalSchedule,
    InfeasibleBudget as InfeasibleBudget,
)
from planner.solvers.instances import load_problem as load_problem
from planner.solvers.problem import (
    Link as Link,
    Op as Op,
    Problem as Problem,
    Segment as Segment,
    Storage as Storage,
)
from planner.solvers.result import Result as Result
from planner.solvers.simulator import simulate as simulate, unroll as unroll
from planner.solvers.solve import ALGORITHMS, solve as solve
from planner.solvers.task import Algorithm as Algorithm, Proposal as Proposal, Task as Task

SOLVERS = tuple(ALGORITHMS)
"""Names of the available solvers; `solve` takes any other `Algorithm` as well."""
