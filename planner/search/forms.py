"""The forms of a step, and the cheapest over all of them.

Each form is a problem of its own for the solver.  One with copies pays for them whether or not
anything is recomputed, so that it is asked only where the base form costs more than that; what is
proven holds over all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from planner.search.effort import Effort
from planner.solvers.actions import as_order
from planner.solvers.errors import InfeasibleBudget as Refusal
from planner.solvers.incumbent import PROOF_TOLERANCE
from planner.solvers.minimum import minimum_peak
from planner.solvers.problem import Schedule
from planner.solvers.result import Result
from planner.solvers.solve import solve
from planner.step.form import Form

_LEAST_FIRST_SHARE, _FIRST_SHARE = 0.2, 0.5
"""Part of the time for the base form, where there are others: less, the nearer the budget is to
what that form takes at least."""
LEAST_SHARE = 0.1
"""Part of the time that another form gets whatever the first has used."""


class _Priced(Protocol):
    @property
    def cost(self) -> float: ...


_Source = TypeVar("_Source")
_Found = TypeVar("_Found", bound=_Priced)


def choose(sources: Iterable[_Source], attempt: Callable[[_Source], _Found | None],
           is_worth: Callable[[_Source, _Found], bool] = lambda source, best: True
           ) -> tuple[_Source, _Found] | None:
    """The cheapest that `attempt` finds over the forms of a step, or what stands for each, the base
    form first; `None` where it finds nothing.

    `is_worth`: whether a form may be cheaper than the best so far; else it is not tried.
    """
    best: tuple[_Source, _Found] | None = None
    for source in sources:
        if best is not None and not is_worth(source, best[1]):
            continue
        found = attempt(source)
        if found is not None and (best is None or found.cost < best[1].cost):
            best = source, found
    return best


def solve_form(form: Form, net_bytes: int | None, effort: Effort,
               warm_start: Schedule | None = None, work_limit: float | None = None) -> Result:
    """What the solver finds for one form within `net_bytes`; costs are relative to the base form.
    `work_limit`: see `solvers.solve`.  Raises `solvers.InfeasibleBudget`."""
    if effort.is_thorough and work_limit is None:
        work_limit = math.inf
    fits = warm_start and max(as_order(warm_start)) + 1 == len(form.problem)
    given = warm_start if fits else None
    result = solve(form.problem, net_bytes, solver=effort.solver, time_limit=effort.time_limit,
                   seed=effort.seed, progress=effort.progress, warm_start=given,
                   work_limit=work_limit)
    return replace(result, keep_all_cost=form.base_seconds)


def cheapest(forms: Sequence[Form], net_bytes: int, effort: Effort,
             warm_start: Schedule | None = None) -> tuple[Form, Result | Refusal]:
    """The cheapest schedule found within `net_bytes`, and the form that it is of; where there is
    none, the form that comes nearest and the solver's refusal, with the smallest `minimum_bytes`.
    """
    started = time.monotonic()
    base, is_only = forms[0], len(forms) == 1
    refusals: list[tuple[Form, Refusal]] = []
    bounds: dict[Form, float] = {}
    interrupted = False

    def ask(form: Form, seconds: float, start: Schedule | None = warm_start) -> Result | None:
        nonlocal interrupted
        try:
            result = solve_form(form, net_bytes, replace(effort, time_limit=seconds), start)
        except Refusal as refusal:
            refusals.append((form, refusal))
            bounds[form] = refusal.lower_bound if form.may_fit(net_bytes) else math.inf
            return None
        interrupted |= result.interrupted
        bounds[form] = max(result.lower_bound, bounds.get(form, 0.0))
        return result

    def seconds_left() -> float:
        return max(effort.time_limit - (time.monotonic() - started),
                   LEAST_SHARE * effort.time_limit)

    def attempt(form: Form) -> Result | None:
        if is_only:
            return ask(form, effort.time_limit)
        if form is not base:
            return ask(form, seconds_left() if len(forms) == 2
                       else LEAST_SHARE * effort.time_limit)
        if not form.may_fit(net_bytes):  # then it is only asked for its minimum, if nothing fits
            return None
        room = 1 - form.floor_bytes / max(net_bytes, 1)
        return ask(form, min(max(room, _LEAST_FIRST_SHARE), _FIRST_SHARE) * effort.time_limit)

    found = choose(forms, attempt, lambda form, best: (
        not interrupted and best.cost > form.problem.keep_all_cost))
    if found is None:
        if all(form is not base for form, _ in refusals):
            ask(base, LEAST_SHARE * effort.time_limit)
        return min(refusals, key=lambda refused: refused[1].minimum_bytes)
    form, result = found
    if len(forms) > 2 and result.status != "optimal" and not interrupted:
        # Each had a short look; the best has the rest.
        result = ask(form, seconds_left(), result.schedule) or result
    return form, replace(over_all_forms(result, bounds.values()),
                         seconds=time.monotonic() - started)


def over_all_forms(result: Result, bounds: Iterable[float]) -> Result:
    """The cheapest result with what is proven over all forms; `bounds`: on the cost of any schedule
    of each that may fit."""
    bound = min(*bounds, result.cost)
    proven = result.status == "optimal" and (
        result.cost <= bound + PROOF_TOLERANCE * result.keep_all_cost)
    return replace(result, lower_bound=bound, status="optimal" if proven else "feasible")


def smallest(forms: Sequence[Form], enough_net_bytes: int = 0) -> tuple[Form, Schedule]:
    """The schedule with the smallest peak that the search for it finds (`solvers.minimum`), and the
    form that it is of; a peak of `enough_net_bytes` is as good as a smaller one."""
    found = []
    for form in forms:
        problem = form.problem
        schedule: Schedule
        if problem.link is None:
            schedule = minimum_peak(problem, target_bytes=enough_net_bytes)
        else:
            try:
                schedule = solve(problem, enough_net_bytes).schedule
            except Refusal as refusal:
                schedule = refusal.schedule
        peak = form.net_peak_bytes(schedule)
        found.append((peak, form, schedule))
        if peak <= enough_net_bytes:
            break
    _, form, schedule = min(found, key=lambda each: each[0])
    return form, schedule


def without_workspace(form: Form) -> Form:
    """The form with a problem whose ops take nothing for themselves."""
    return replace(form, problem=replace(form.problem, ops=tuple(
        replace(op, workspace_bytes=0) for op in form.problem.ops)))
