"""One signature for every algorithm; the simulator evaluates every result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType

from planner.solvers.actions import Schedule, as_order, as_schedule, known_actions
from planner.solvers.errors import InfeasibleBudget
from planner.solvers.incumbent import PROOF_TOLERANCE
from planner.solvers.minimum import working_set_floor
from planner.solvers.offload import jointly, rank, relaxed
from planner.solvers.problem import Problem
from planner.solvers.result import Result
from planner.solvers.simulator import simulate
from planner.solvers.task import Algorithm, Progress, Task

ALGORITHMS: MappingProxyType[str, str] = MappingProxyType({
    "auto": "auto", "none": "keep_all", "sqrt_n": "sqrt_n", "dp": "dp", "ilp": "ilp",
})
"""Every solver by name, and the module here whose function of the same name it is.  A module is
imported on first use, since OR-Tools is slow to import."""


def algorithm(name: str) -> Algorithm:
    """Return the solver of this name; raise `ValueError` for an unknown one."""
    if name not in ALGORITHMS:
        raise ValueError(f"expected one of the solvers {', '.join(sorted(ALGORITHMS))}, "
                         f"got {name!r}")
    module = import_module(f"planner.solvers.{ALGORITHMS[name]}")
    found: Algorithm = getattr(module, ALGORITHMS[name])
    return found


def solve(problem: Problem, budget_bytes: int | None = None, *, solver: str | Algorithm = "auto",
          time_limit: float = 60.0, seed: int = 0, progress: Progress | None = None,
          warm_start: Schedule | None = None, ideas: Sequence[Schedule] = (),
          work_limit: float | None = None) -> Result:
    """Return the cheapest schedule of `problem` found whose peak is at most `budget_bytes`.

    `None` means no limit.  `solver` is one of `ALGORITHMS`, or any function from a `Task` to a
    `Proposal`.  `time_limit` is in seconds and soft: a model under way is finished.  `warm_start`
    is a legal schedule to start from, such as that for a smaller budget; if it fits, the result
    never costs more than it.  `ideas` are legal schedules, within the budget or not, whose
    recomputations are worth a try.  `auto` counts its work (in seconds of a reference machine) and
    stops when the remaining gain is not worth more of it, so the time limit only ends searches that
    last far longer.  `work_limit` is another limit on that work; with `math.inf` the search lasts
    until the time limit.  If the problem has a link, results may also be stored on the host
    (`solvers.offload`), which lasts up to half as long again.  `progress` receives lines of text.

    Ctrl-C (`KeyboardInterrupt`) ends the search of `auto` with the best schedule so far, if one
    fits; `Result.interrupted` is then true.

    Raises `InfeasibleBudget` if no schedule within the budget was found, with a `minimum_bytes`
    that this solver meets, `IllegalSchedule` for an illegal warm start, and `ValueError` for an
    unknown solver, a negative budget or a time limit that is not positive.
    """
    started = time.monotonic()
    propose = algorithm(solver) if isinstance(solver, str) else solver
    if budget_bytes is not None and (isinstance(budget_bytes, bool)
                                     or int(budget_bytes) != budget_bytes or budget_bytes < 0):
        raise ValueError(f"expected a whole number of bytes >= 0 as the budget, got {budget_bytes}")
    if not time_limit > 0:
        raise ValueError(f"expected a time limit of more than 0 seconds, got {time_limit}")
    keep_all_peak, _ = simulate(problem, problem.keep_all_schedule)
    budget = keep_all_peak if budget_bytes is None else int(budget_bytes)
    for given in (*ideas, *(() if warm_start is None else (warm_start,))):
        simulate(problem, given)  # which refuses illegal ones

    start = None if warm_start is None else as_order(warm_start)
    if problem.link is not None:
        propose = jointly(propose)
    proposal = propose(Task(problem, budget, started + time_limit, seed, start,
                            tuple(map(as_order, ideas)), progress, work_limit))
    schedule, bound = proposal.schedule, max(proposal.lower_bound, problem.keep_all_cost)
    if warm_start is not None:
        schedule = min((schedule, known_actions(warm_start)),
                       key=lambda s: rank(problem, budget, s))
    schedule = as_schedule(schedule)
    peak, cost = simulate(problem, schedule)
    if peak > budget:
        floor = working_set_floor(problem if problem.link is None else relaxed(problem))
        raise InfeasibleBudget(budget, peak, schedule=schedule, lower_bound=bound,
                               proven_minimum_bytes=floor or None)
    proven = cost <= bound + PROOF_TOLERANCE * problem.keep_all_cost and not proposal.late
    return Result(
        schedule=schedule, peak_bytes=peak, cost=cost, keep_all_cost=problem.keep_all_cost,
        lower_bound=min(bound, cost), status="optimal" if proven else "feasible",
        seconds=time.monotonic() - started,
        solver=solver if isinstance(solver, str) else getattr(solver, "__name__", "given"),
        interrupted=proposal.interrupted)
