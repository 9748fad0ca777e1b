"""One problem under many budgets: each result helps its neighbours.

Upwards, a schedule within one budget is within every larger budget, and starts the search there.
Downwards, a bound under one budget holds under every smaller one, and the recomputations of the
schedule above are offered to the search below.  The first pass goes upwards; the remaining time
goes to the budgets with the widest gaps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.solvers.incumbent import PROOF_TOLERANCE
from planner.solvers.problem import Problem, Schedule
from planner.solvers.result import Result
from planner.solvers.solve import solve
from planner.solvers.task import Progress

FIRST_PASS = 0.6
"""Share of the time for the first pass."""
WIDE_GAP = 1e-3
"""A gap, as a fraction of the keep-all cost, that is worth a second search."""


def solve_all(problem: Problem, budgets: Sequence[int], *, seconds: float, solver: str = "auto",
              most_seconds: float = float("inf"), start: Schedule | None = None,
              known: Mapping[int, Result] | None = None,
              progress: Progress | None = None) -> list[Result]:
    """Solve for ascending `budgets` within about `seconds` in all and `most_seconds` for each.  No
    result costs more than one of a smaller budget.

    `start`: an initial schedule.  `known`: results for some of the budgets.  Raises the errors of
    `solvers.solve`.
    """
    begin = time.monotonic()
    results: list[Result] = []

    def left(share: float, count: int) -> float:
        rest = begin + share * seconds - time.monotonic()
        return max(0.05, min(most_seconds, rest / count))

    for number, budget in enumerate(budgets):
        if known is not None and budget in known:
            results.append(known[budget])
            start = known[budget].schedule
            continue
        if progress is not None:
            progress(f"budget {number + 1} of {len(budgets)}")
        result = solve(problem, budget, solver=solver, progress=progress,
                       time_limit=left(FIRST_PASS, len(budgets) - number), warm_start=start)
        results.append(result)
        start = result.schedule
    _share(problem, results)
    wide = sorted((i for i, result in enumerate(results) if result.gap > WIDE_GAP),
                  key=lambda i: -results[i].gap)
    for rank, i in enumerate(wide):
        limit = left(1.0, len(wide) - rank)
        if time.monotonic() + limit > begin + seconds or results[i].gap <= WIDE_GAP:
            continue
        if progress is not None:
            progress(f"budget {i + 1} of {len(budgets)}, again")
        above = [results[i + 1].schedule] if i + 1 < len(results) else []
        again = solve(problem, budgets[i], solver=solver, seed=1, progress=progress,
                      time_limit=limit, warm_start=results[i].schedule, ideas=above)
        results[i] = replace(again, lower_bound=max(again.lower_bound, results[i].lower_bound),
                             seconds=again.seconds + results[i].seconds)
        _share(problem, results)
    return results


def _share(problem: Problem, results: list[Result]) -> None:
    """Pass schedules up and bounds down."""
    for i in range(1, len(results)):
        below, here = results[i - 1], results[i]
        if below.cost < here.cost:
            results[i] = replace(here, schedule=below.schedule, peak_bytes=below.peak_bytes,
                                 cost=below.cost)
    bound = 0.0
    for i in range(len(results) - 1, -1, -1):
        bound = max(bound, results[i].lower_bound)
        cost = results[i].cost
        proven = cost <= bound + PROOF_TOLERANCE * problem.keep_all_cost
        results[i] = replace(results[i], lower_bound=min(bound, cost),
                             status="optimal" if proven else "feasible")
