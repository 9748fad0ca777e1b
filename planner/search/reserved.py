"""Plan within a limit on memory that torch reserves, which includes allocated memory.

Model of the world: solvers know allocated memory.  A replay of the whole loop
(`planner.step.reserved`) computes the reserved memory of a schedule, which is larger.  So the limit
on allocated memory is lowered by the excess until the reserved memory fits, and then bisected
between limits that fit and limits that do not.  The cheapest schedule that fits is returned.  A
proof for the budget as a limit on allocated memory also holds for it as a limit on reserved memory.

If nothing fits, the schedules with the lowest peaks decide; they do not depend on the budget, so
planning with the smallest feasible budget finds the same schedule.

Blind spots: a schedule that allocates less may reserve more; a cheaper schedule may fit between two
tried limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from planner.errors import InfeasibleBudget
from planner.search.eager import schedule_within, smallest_result
from planner.search.variants import Effort
from planner.solvers.incumbent import PROOF_TOLERANCE
from planner.solvers.problem import Schedule
from planner.solvers.result import Result
from planner.solvers.simulator import is_legal, unroll
from planner.step.breakdown import describe_bottleneck
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant
from planner.units import format_bytes

_SOLVES = 7
"""Number of limits on allocated memory that are tried."""
_NEAR = 0.005
"""Limits that differ by less than this fraction of the budget count as equal."""
_LARGER = (1.03, 1.1)
"""Limits tried if nothing fits, as multiples of the smallest feasible one, which is tried, too."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A schedule and its memory."""

    variant: Variant
    result: Result
    allocated_bytes: int
    reserved_bytes: int


def schedule_reserving(prepared: PreparedStep, budget_bytes: int, effort: Effort, *,
                       warm_start: Schedule | None = None) -> tuple[Variant, Result]:
    """The cheapest schedule found that reserves at most `budget_bytes`, and its graph variant;
    raises `InfeasibleBudget`."""
    fitting, bound = _lowered(prepared, budget_bytes, effort, warm_start)
    if not fitting:
        small = [*_smallest(prepared, effort)]
        fitting = [tried for tried in small if tried.reserved_bytes <= budget_bytes]
        if not fitting:
            raise _refusal(prepared, budget_bytes, small)
    best = min(fitting, key=lambda tried: tried.result.cost)
    # The bound is the one proven for the budget, not for the limit of this schedule.
    return best.variant, replace(
        best.result, lower_bound=min(bound, best.result.cost),
        status=best.result.status if _is_proven(prepared, best, bound) else "feasible")


def reserved_refusal(prepared: PreparedStep, budget_bytes: int, effort: Effort) -> InfeasibleBudget:
    """The error if no schedule was found that reserves at most `budget_bytes`."""
    return _refusal(prepared, budget_bytes, _smallest(prepared, effort))


def _lowered(prepared: PreparedStep, budget_bytes: int, effort: Effort,
             warm_start: Schedule | None) -> tuple[list[_Tried], float]:
    """All schedules found that fit, under a sequence of limits on allocated memory; and the bound
    on the cost under the first limit, the budget."""
    fitting = [tried for tried in _known(prepared, effort, warm_start)
               if tried.reserved_bytes <= budget_bytes]
    bound, near = 0.0, max(1, int(_NEAR * budget_bytes))
    low, high = 0, budget_bytes  # what fits or has no schedule; what does not fit
    limit = budget_bytes
    for number in range(_SOLVES):
        try:
            tried = _within(prepared, limit, _part(effort) if number else replace(
                effort, time_limit=effort.time_limit / 2), warm_start)
        except InfeasibleBudget:
            if not number:
                break
            low = limit
        else:
            over = tried.reserved_bytes - budget_bytes
            if not number:
                bound = tried.result.lower_bound
            if over > 0:
                high = min(high, tried.allocated_bytes)
            else:
                fitting.append(tried)
                low = limit
                if not number or _is_proven(prepared, tried, bound):
                    break
        if high - low <= near:
            break
        limit = (low + high) // 2 if low else max(1, high - max(over, near))
    return fitting, bound


def _smallest(prepared: PreparedStep, effort: Effort) -> Iterator[_Tried]:
    """Schedules with low peaks, independent of the budget."""
    variant, result = smallest_result(prepared, _part(effort))
    smallest = _tried(prepared, variant, result)
    yield smallest
    for factor in _LARGER:
        with suppress(InfeasibleBudget):
            yield _within(prepared, int(factor * smallest.allocated_bytes), _part(effort),
                          result.schedule)


def _part(effort: Effort) -> Effort:
    """The effort for one limit after the first."""
    return replace(effort, time_limit=effort.time_limit / 2 / _SOLVES)


def _is_proven(prepared: PreparedStep, tried: _Tried, bound: float) -> bool:
    return tried.result.cost <= bound + PROOF_TOLERANCE * prepared.base.base_seconds


def _within(prepared: PreparedStep, limit_bytes: int, effort: Effort,
            warm_start: Schedule | None) -> _Tried:
    return _tried(prepared, *schedule_within(prepared, limit_bytes, effort, warm_start=warm_start))


def _known(prepared: PreparedStep, effort: Effort, schedule: Schedule | None) -> Iterator[_Tried]:
    """The schedule of another size, of each graph variant that it is legal for."""
    if schedule is None:
        return
    for variant in prepared.variants:
        if is_legal(variant.problem, schedule):
            timeline = unroll(variant.problem, schedule)
            yield _tried(prepared, variant, Result(
                schedule, timeline.peak_bytes, timeline.cost, variant.base_seconds, 0.0, "feasible",
                0.0, effort.solver))


def _tried(prepared: PreparedStep, variant: Variant, result: Result) -> _Tried:
    timeline = unroll(variant.problem, result.schedule)
    reserved_bytes = prepared.reserved_bytes(variant, timeline)
    assert reserved_bytes is not None, "such a step is not planned by what is reserved"
    return _Tried(variant, result, variant.budget.whole_bytes(timeline.peak_bytes), reserved_bytes)


def _refusal(prepared: PreparedStep, budget_bytes: int, tries: Iterable[_Tried]
             ) -> InfeasibleBudget:
    smallest = min(tries, key=lambda tried: tried.reserved_bytes)
    variant, around = smallest.variant, prepared.surroundings
    timeline = unroll(variant.problem, smallest.result.schedule)
    words = (f"{describe_bottleneck(variant, timeline)} Of the "
             f"{format_bytes(smallest.reserved_bytes)} that torch reserves then, "
             f"{format_bytes(smallest.allocated_bytes)} are allocated")
    if around is not None and not around.expandable:
        reserved_bytes = replace(around, expandable=True).reserved_bytes(
            around.planned(variant.graph, timeline))
        words += (f"; with expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True) it "
                  f"reserves {format_bytes(reserved_bytes)}")
    return InfeasibleBudget(budget_bytes, smallest.reserved_bytes, f"{words}.",
                            proven_minimum_bytes=prepared.proven_minimum_bytes)
