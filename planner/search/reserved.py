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
from dataclasses import dataclass, replace

from planner.errors import InfeasibleBudget
from planner.search.eager import schedule_within, smallest_result
from planner.search.effort import Effort
from planner.solvers.actions import as_order
from planner.solvers.incumbent import PROOF_TOLERANCE
from planner.solvers.problem import Schedule
from planner.solvers.result import Result
from planner.solvers.simulator import unroll
from planner.step.breakdown import describe_bottleneck
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant
from planner.units import format_bytes

_SOLVES = 7
"""Number of limits on allocated memory that are tried."""
_NEAR = 0.005
"""Limits that differ by less than this fraction of the budget count as equal."""
_SMALL = (1.0, 1.03, 1.1)
"""Limits tried if nothing fits, as multiples of the smallest feasible one."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A schedule and its memory."""

    variant: Variant
    result: Result
    allocated_bytes: int
    reserved_bytes: int

    @property
    def cost(self) -> float:
        return self.result.cost


def schedule_reserving(prepared: PreparedStep, budget_bytes: int, effort: Effort, *,
                       warm_start: Schedule | None = None) -> tuple[Variant, Result]:
    """The cheapest schedule found that reserves at most `budget_bytes`, and its graph variant;
    raises `InfeasibleBudget`."""
    search = _Search(prepared, budget_bytes, effort)
    fitting = search.lower(warm_start)
    if not fitting:
        small = tuple(search.smallest())
        fitting = [tried for tried in small if tried.reserved_bytes <= budget_bytes]
        if not fitting:
            raise _refusal(prepared, budget_bytes, small)
    best = min(fitting, key=lambda tried: tried.cost)
    return best.variant, search.evaluated(best.result)


def reserved_refusal(prepared: PreparedStep, budget_bytes: int, effort: Effort) -> InfeasibleBudget:
    """The error if no schedule was found that reserves at most `budget_bytes`."""
    return _refusal(prepared, budget_bytes, _Search(prepared, budget_bytes, effort).smallest())


class _Search:
    """Search for one budget; stores the bound proven for the first limit."""

    def __init__(self, prepared: PreparedStep, budget_bytes: int, effort: Effort) -> None:
        self.prepared, self.budget_bytes = prepared, budget_bytes
        self.first_effort = replace(effort, time_limit=effort.time_limit / 2)
        self.effort = replace(effort, time_limit=effort.time_limit / 2 / _SOLVES)
        self.bound = 0.0

    def lower(self, warm_start: Schedule | None) -> list[_Tried]:
        """All schedules found that fit, under a sequence of limits on allocated memory."""
        fitting: list[_Tried] = []
        if warm_start is not None:
            fitting += [tried for variant in self.prepared.variants
                        if (tried := self._known(variant, warm_start)) is not None
                        and tried.reserved_bytes <= self.budget_bytes]
        low, high = 0, self.budget_bytes
        limit, near = self.budget_bytes, max(1, int(_NEAR * self.budget_bytes))
        for number in range(_SOLVES):
            try:
                tried = self._within(limit, self.effort if number else self.first_effort,
                                     warm_start)
            except InfeasibleBudget:
                if limit == self.budget_bytes:
                    break
                low, limit = limit, (limit + high) // 2
                if high - low <= near:
                    break
                continue
            if limit == self.budget_bytes:
                self.bound = tried.result.lower_bound
            over = tried.reserved_bytes - self.budget_bytes
            if over <= 0:
                fitting.append(tried)
                low = limit
                if limit == self.budget_bytes or self._is_proven(tried.cost):
                    break
            else:
                high = min(high, tried.allocated_bytes)
            limit = (low + high) // 2 if low else high - max(over, near)
            if high - low <= near or limit <= 0:
                break
        return fitting

    def smallest(self) -> Iterator[_Tried]:
        """Schedules with low peaks, independent of the budget."""
        variant, result = smallest_result(self.prepared, self.effort)
        smallest = self._tried(variant, result)
        yield smallest
        for factor in _SMALL[1:]:
            try:
                yield self._within(int(factor * smallest.allocated_bytes), self.effort,
                                   result.schedule)
            except InfeasibleBudget:
                continue

    def evaluated(self, result: Result) -> Result:
        """The result with the bound proven for the budget instead of the limit it was found
        with."""
        return replace(
            result, lower_bound=min(self.bound, result.cost),
            status=result.status if self._is_proven(result.cost) else "feasible")

    def _is_proven(self, cost: float) -> bool:
        return cost <= self.bound + PROOF_TOLERANCE * self.prepared.base.base_seconds

    def _within(self, limit_bytes: int, effort: Effort, warm_start: Schedule | None) -> _Tried:
        return self._tried(*schedule_within(self.prepared, limit_bytes, effort,
                                            warm_start=warm_start))

    def _known(self, variant: Variant, schedule: Schedule) -> _Tried | None:
        """A schedule of another size; `None` if it does not fit this variant."""
        if max(as_order(schedule)) + 1 != len(variant.problem):
            return None
        timeline = unroll(variant.problem, schedule)
        return self._tried(
            variant,
            Result(
                schedule,
                timeline.peak_bytes,
                timeline.cost,
                variant.base_seconds,
                0.0,
                "feasible",
                0.0,
                self.effort.solver,
            ),
        )

    def _tried(self, variant: Variant, result: Result) -> _Tried:
        timeline = unroll(variant.problem, result.schedule)
        reserved_bytes = self.prepared.reserved_bytes(variant, timeline)
        assert reserved_bytes is not None, "such a step is not planned by what is reserved"
        if self.effort.progress is not None:
            self.effort.progress(
                f"{format_bytes(variant.budget.whole_bytes(timeline.peak_bytes))} allocated, "
                f"{format_bytes(reserved_bytes)} reserved")
        return _Tried(
            variant, result, variant.budget.whole_bytes(timeline.peak_bytes), reserved_bytes
        )


def _refusal(prepared: PreparedStep, budget_bytes: int, tries: Iterable[_Tried]
             ) -> InfeasibleBudget:
    smallest = min(tries, key=lambda tried: tried.reserved_bytes)
    variant, around = smallest.variant, prepared.surroundings
    timeline = unroll(variant.problem, smallest.result.schedule)
    words = (f"{describe_bottleneck(variant, timeline)} Of the "
             f"{format_bytes(smallest.reserved_bytes)} that torch reserves then, "
             f"{format_bytes(smallest.allocated_bytes)} are allocated")
    if around is not None and not around.expandable:
        found = replace(around, expandable=True).replay(around.planned(variant.graph, timeline))
        words += (f"; with expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True) it "
                  f"reserves {format_bytes(found.reserved_bytes)}")
    return InfeasibleBudget(budget_bytes, smallest.reserved_bytes, f"{words}.",
                            proven_minimum_bytes=prepared.proven_minimum_bytes)
