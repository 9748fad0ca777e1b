"""One face for every algorithm; the simulator has the last word."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import MappingProxyType

from benchmarks.baselines import checkmate, moccasin
from solvers.auto import auto
from solvers.dp import dp
from solvers.errors import InfeasibleBudget
from solvers.ilp import ilp
from solvers.incumbent import PROOF_TOLERANCE
from solvers.keep_all import keep_all
from solvers.problem import Problem, Schedule
from solvers.result import Result
from solvers.simulator import simulate
from solvers.sqrt_n import sqrt_n
from solvers.task import Algorithm, Progress, Proposal, Task


def _published(method: Callable[..., tuple[Schedule | None, float]]) -> Algorithm:
    """A method of `benchmarks.baselines` with the signature of all others."""
    def algorithm(task: Task) -> Proposal:
        schedule, bound = method(
            task.problem, task.budget_bytes, time_limit=max(0.01, task.seconds_left),
            seed=task.seed, progress=task.progress, warm_start=task.warm_start)
        return Proposal(task.problem.plain_schedule if schedule is None else schedule, bound)
    return algorithm


ALGORITHMS: MappingProxyType[str, Algorithm] = MappingProxyType({
    "auto": auto,
    "none": keep_all,
    "sqrt_n": sqrt_n,
    "dp": dp,
    "ilp": ilp,
    "checkmate": _published(checkmate),
    "moccasin": _published(moccasin),
})
"""Every solver by name."""


def solve(problem: Problem, budget_bytes: int | None = None, *, solver: str = "auto",
          time_limit: float = 60.0, seed: int = 0, progress: Progress | None = None,
          warm_start: Schedule | None = None, ideas: Sequence[Schedule] = ()) -> Result:
    """The cheapest schedule of `problem` found whose peak is at most `budget_bytes`.

    `None` means no limit.  `time_limit` is in seconds and soft: a model under way is finished.
    `warm_start` is a legal schedule to start from, such as that for a smaller budget; the result
    never costs more than it where it fits.  `ideas` are legal schedules, within the budget or not,
    whose recomputations are worth a try.  `progress` receives lines of text.

    Raises `InfeasibleBudget` where no schedule within the budget was found, with a
    `minimum_bytes` that this solver meets, `IllegalSchedule` for an illegal warm start, and
    `ValueError` for an unknown solver, a negative budget or a time limit that is not positive.
    """
    started = time.monotonic()
    if solver not in ALGORITHMS:
        raise ValueError(f"expected one of the solvers {', '.join(sorted(ALGORITHMS))}, "
                         f"got {solver!r}")
    if budget_bytes is not None and (isinstance(budget_bytes, bool)
                                     or int(budget_bytes) != budget_bytes or budget_bytes < 0):
        raise ValueError(f"expected a whole number of bytes >= 0 as the budget, got {budget_bytes}")
    if not time_limit > 0:
        raise ValueError(f"expected a time limit of more than 0 seconds, got {time_limit}")
    plain_peak, _ = simulate(problem, problem.plain_schedule)
    budget = plain_peak if budget_bytes is None else int(budget_bytes)
    for given in (*ideas, *(() if warm_start is None else (warm_start,))):
        simulate(problem, given)  # which refuses illegal ones

    task = Task(problem, budget, started + time_limit, seed, warm_start, tuple(ideas), progress)
    proposal = ALGORITHMS[solver](task)
    schedule, bound = proposal.schedule, max(proposal.lower_bound, problem.plain_cost)
    if warm_start is not None:
        schedule = min((schedule, tuple(warm_start)), key=lambda s: _rank(problem, budget, s))
    peak, cost = simulate(problem, schedule)
    if peak > budget:
        raise InfeasibleBudget(budget, peak, schedule=schedule, lower_bound=bound)
    proven = cost <= bound + PROOF_TOLERANCE * problem.plain_cost and not proposal.late
    return Result(
        schedule=schedule, peak_bytes=peak, cost=cost, plain_cost=problem.plain_cost,
        lower_bound=min(bound, cost), status="optimal" if proven else "feasible",
        seconds=time.monotonic() - started, solver=solver)


def _rank(problem: Problem, budget_bytes: int, schedule: Schedule) -> tuple[int, float]:
    """Smaller is better: first what fits, by cost; then by the excess over the budget."""
    peak, cost = simulate(problem, schedule)
    return (0, cost) if peak <= budget_bytes else (peak - budget_bytes, cost)
