"""Search over the graph variants of a step for the cheapest schedule.

Each variant is a separate problem for the solver.  A variant with copies pays for them whether or
not anything is recomputed, so it is solved only if the base variant costs more than that; proofs
hold over all variants.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from planner.progress import Progress, active
from planner.solvers.errors import InfeasibleBudget as Refusal
from planner.solvers.incumbent import PROOF_TOLERANCE
from planner.solvers.minimum import minimum_peak
from planner.solvers.problem import Schedule
from planner.solvers.result import Result
from planner.solvers.simulator import is_legal
from planner.solvers.solve import solve
from planner.step.variant import Variant

USUAL_TIME_LIMIT = 60.0
"""Seconds.  Above this limit, a search continues until the limit."""
_BRIEF_WORK = 0.2
"""Work (see `solvers.solve`) of a brief search."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Solver and limits of a search."""

    solver: str = "auto"
    time_limit: float = USUAL_TIME_LIMIT
    """Seconds; soft.  A search ends earlier when more of it is not worth it."""
    is_thorough: bool = False
    """If True, a search of a step that runs op by op continues until the time limit."""
    is_brief: bool = False
    """If True, such a search ends soon after its first schedule: its plan is for one step."""
    work_limit: float | None = None
    """Time limit, in nominal seconds, of a search that counts its work, so that its result does not
    depend on the duration of capture; `None`: the time limit."""
    progress: Progress | None = field(default_factory=active)


_LEAST_FIRST_SHARE, _FIRST_SHARE = 0.2, 0.5
"""Fraction of the time for the base variant, if there are others: less, the nearer the budget is to
that variant's minimum."""
LEAST_SHARE = 0.1
"""Fraction of the time that another variant gets, however much the first has used."""


class _Priced(Protocol):
    @property
    def cost(self) -> float: ...


_Source = TypeVar("_Source")
_Found = TypeVar("_Found", bound=_Priced)


def choose(sources: Iterable[_Source], attempt: Callable[[_Source], _Found | None],
           is_worth: Callable[[_Source, _Found], bool]) -> tuple[_Source, _Found] | None:
    """The cheapest result of `attempt` over the variants of a step (or other `sources`), the base
    variant first; `None` if it finds nothing.

    `is_worth`: returns whether a variant may be cheaper than the best so far; else it is not tried.
    """
    best: tuple[_Source, _Found] | None = None
    for source in sources:
        if best is not None and not is_worth(source, best[1]):
            continue
        found = attempt(source)
        if found is not None and (best is None or found.cost < best[1].cost):
            best = source, found
    return best


def solve_variant(variant: Variant, net_bytes: int | None, effort: Effort,
                  warm_start: Schedule | None = None, work_limit: float | None = None) -> Result:
    """The solver's result for one variant within `net_bytes`; costs are relative to the base
    variant. `work_limit`: see `solvers.solve`.  Raises `solvers.InfeasibleBudget`."""
    if effort.is_thorough and work_limit is None:
        work_limit = math.inf
    if effort.is_brief and work_limit is None:
        work_limit = _BRIEF_WORK
    if warm_start is not None and not is_legal(variant.problem, warm_start):
        warm_start = None  # it is that of another variant
    result = solve(variant.problem, net_bytes, solver=effort.solver, time_limit=effort.time_limit,
                   progress=effort.progress, warm_start=warm_start, work_limit=work_limit)
    return replace(result, keep_all_cost=variant.base_seconds)


def cheapest(variants: Sequence[Variant], net_bytes: int, effort: Effort,
             warm_start: Schedule | None = None) -> tuple[Variant, Result | Refusal]:
    """The cheapest schedule found within `net_bytes` and its variant; if there is none, the variant
    with the smallest `minimum_bytes`, and the solver's refusal."""
    started = time.monotonic()
    base, is_only = variants[0], len(variants) == 1
    refusals: list[tuple[Variant, Refusal]] = []
    bounds: dict[Variant, float] = {}
    interrupted = False

    def ask(variant: Variant, seconds: float, start: Schedule | None = warm_start) -> Result | None:
        nonlocal interrupted
        try:
            result = solve_variant(variant, net_bytes, replace(effort, time_limit=seconds), start)
        except Refusal as refusal:
            refusals.append((variant, refusal))
            bounds[variant] = refusal.lower_bound if variant.may_fit(net_bytes) else math.inf
            return None
        interrupted |= result.interrupted
        bounds[variant] = max(result.lower_bound, bounds.get(variant, 0.0))
        return result

    def seconds_left() -> float:
        return max(effort.time_limit - (time.monotonic() - started),
                   LEAST_SHARE * effort.time_limit)

    def attempt(variant: Variant) -> Result | None:
        if is_only:
            return ask(variant, effort.time_limit)
        if variant is not base:
            return ask(variant, seconds_left() if len(variants) == 2
                       else LEAST_SHARE * effort.time_limit)
        if not variant.may_fit(net_bytes):  # only its minimum matters, if nothing fits
            return None
        headroom = 1 - variant.floor_bytes / max(net_bytes, 1)
        return ask(
            variant, min(max(headroom, _LEAST_FIRST_SHARE), _FIRST_SHARE) * effort.time_limit
        )

    found = choose(variants, attempt, lambda variant, best: (
        not interrupted and best.cost > variant.problem.keep_all_cost))
    if found is None:
        if all(variant is not base for variant, _ in refusals):
            ask(base, LEAST_SHARE * effort.time_limit)
        return min(refusals, key=lambda refused: refused[1].minimum_bytes)
    variant, result = found
    if len(variants) > 2 and result.status != "optimal" and not interrupted:
        # Each variant had a short try; the best gets the rest.
        result = ask(variant, seconds_left(), result.schedule) or result
    return variant, replace(over_all_variants(result, bounds.values()),
                            seconds=time.monotonic() - started)


def over_all_variants(result: Result, bounds: Iterable[float]) -> Result:
    """The cheapest result with its proof over all variants; `bounds`: per variant, a lower bound on
    the cost of any schedule that may fit."""
    bound = min(*bounds, result.cost)
    proven = result.status == "optimal" and (
        result.cost <= bound + PROOF_TOLERANCE * result.keep_all_cost)
    return replace(result, lower_bound=bound, status="optimal" if proven else "feasible")


def smallest(variants: Sequence[Variant], enough_net_bytes: int = 0) -> tuple[Variant, Schedule]:
    """The schedule with the smallest peak that the search for it finds (`solvers.minimum`), and
    its variant; a peak of `enough_net_bytes` is as good as a smaller one."""
    best: tuple[int, Variant, Schedule] | None = None
    for variant in variants:
        if best is not None and best[0] <= max(enough_net_bytes, variant.floor_bytes):
            continue
        problem = variant.problem
        schedule: Schedule
        if problem.link is None:
            schedule = minimum_peak(problem, target_bytes=enough_net_bytes)
        else:
            try:
                schedule = solve(problem, enough_net_bytes).schedule
            except Refusal as refusal:
                schedule = refusal.schedule
        peak = variant.net_peak_bytes(schedule)
        if best is None or peak < best[0]:
            best = peak, variant, schedule
    assert best is not None, "a step has a variant"
    return best[1:]
