"""The variants of a step, and the cheapest schedule over all of them.

A step may be captured in a second form, whose backward holds less at the price of copies
(`graph_capture.joint_graph.low_peak_backward`).  Each form is a problem of its own for the solver.
The copies are paid whether or not anything is recomputed, so that the lean form is asked only where
the other costs more than that; what is proven holds over both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import solvers.errors
from solvers.incumbent import PROOF_TOLERANCE
from solvers.minimum import working_set_floor
from solvers.problem import Schedule
from solvers.result import Result
from solvers.solve import solve

if TYPE_CHECKING:
    from planner.search.planning import Effort, PreparedStep

_LEAST_FIRST_SHARE, _FIRST_SHARE = 0.2, 0.5
"""Part of the time for the form without copies, where there are two: less, the nearer the budget is
to what that form takes at least."""
_LEAST_SHARE = 0.1
"""Part of the time that the lean form gets whatever the other has used."""


class Refused(Exception):
    """No schedule of any variant was found within a budget."""

    def __init__(self, step: PreparedStep, refusal: solvers.errors.InfeasibleBudget) -> None:
        super().__init__(str(refusal))
        self.step = step
        """The variant that comes nearest."""
        self.minimum_bytes = refusal.minimum_bytes
        """The smallest budget, above resident memory, that it is known to meet."""
        self.schedule = refusal.schedule
        """A schedule of it that does."""


def solve_variant(step: PreparedStep, net_bytes: int | None, effort: Effort,
                  warm_start: Schedule | None = None) -> Result:
    """What the solver finds for one variant within `net_bytes` above resident memory; costs are
    relative to the step without copies.  Raises `solvers.InfeasibleBudget`."""
    given = warm_start if warm_start and max(warm_start) + 1 == len(step.problem) else None
    result = solve(step.problem, net_bytes, solver=effort.solver, time_limit=effort.time_limit,
                   seed=effort.seed, progress=effort.progress, warm_start=given)
    return replace(result, keep_all_cost=step.plain_seconds)


def cheapest(variants: Sequence[PreparedStep], net_bytes: int, effort: Effort,
             warm_start: Schedule | None = None) -> tuple[PreparedStep, Result]:
    """The cheapest schedule found within `net_bytes` above resident memory, and the variant that it
    is of; raises `Refused`.

    The first of `variants` is the step without copies.
    """
    started = time.monotonic()
    found: list[tuple[PreparedStep, Result]] = []
    refusals: list[Refused] = []

    def attempt(step: PreparedStep, seconds: float) -> float:
        """Ask the solver; a bound on what any schedule of the variant costs."""
        try:
            result = solve_variant(step, net_bytes, replace(effort, time_limit=seconds), warm_start)
        except solvers.errors.InfeasibleBudget as refusal:
            refusals.append(Refused(step, refusal))
            return refusal.lower_bound if may_fit(step, net_bytes) else math.inf
        found.append((step, result))
        return result.lower_bound

    plain, *rest = variants
    bounds = []
    if not rest:
        bounds.append(attempt(plain, effort.time_limit))
    elif may_fit(plain, net_bytes):  # else it is only asked for its minimum, if nothing else fits
        room = 1 - working_set_floor(plain.problem) / max(net_bytes, 1)
        share = min(max(room, _LEAST_FIRST_SHARE), _FIRST_SHARE)
        bounds.append(attempt(plain, share * effort.time_limit))
    for lean in rest:
        if not found or found[0][1].cost > lean.problem.keep_all_cost:
            left = effort.time_limit - (time.monotonic() - started)
            bounds.append(attempt(lean, max(left, _LEAST_SHARE * effort.time_limit)))
    if not found:
        if rest and not any(refusal.step is plain for refusal in refusals):
            attempt(plain, _LEAST_SHARE * effort.time_limit)
        raise min(refusals, key=lambda refusal: refusal.minimum_bytes)
    step, result = min(found, key=lambda pair: pair[1].cost)
    bound = min(*bounds, result.cost)
    proven = result.status == "optimal" and (
        result.cost <= bound + PROOF_TOLERANCE * result.keep_all_cost)
    return step, replace(result, lower_bound=bound, status="optimal" if proven else "feasible",
                         seconds=time.monotonic() - started)


def may_fit(step: PreparedStep, net_bytes: int) -> bool:
    """Whether no bound says that every schedule of a variant takes more than `net_bytes` above
    resident memory."""
    return working_set_floor(step.problem) <= net_bytes
