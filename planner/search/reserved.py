"""Planning within what torch reserves, of which what is allocated is a part.

The model of the world: solvers know what is allocated.  What a schedule reserves is told by a
replay of the whole loop (`planner.step.reserved`), and more is reserved than allocated; so the
limit on what is allocated is lowered until what is reserved fits, by as much as it did not fit, and
raised again between what fits and what does not.  Of the schedules that fit the cheapest counts.
What is proven for the budget as a limit on what is allocated holds for it as one on what is
reserved.

Where nothing fits, the schedules that take least decide; they do not depend on the budget, so that
planning with the smallest one that works finds the same.

Blind spots: a schedule that allocates less may reserve more; between two limits that were tried
there may be a cheaper schedule that fits.
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
"""So many limits on what is allocated are tried."""
_NEAR = 0.005
"""Limits that differ by less than this part of the budget are not told apart."""
_SMALL = (1.0, 1.03, 1.1)
"""Limits that are tried where nothing fits, as multiples of the smallest that can be met."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A schedule, and what it takes."""

    variant: Variant
    result: Result
    allocated_bytes: int
    reserved_bytes: int

    @property
    def cost(self) -> float:
        return self.result.cost


def schedule_reserving(prepared: PreparedStep, budget_bytes: int, effort: Effort, *,
                       warm_start: Schedule | None = None) -> tuple[Variant, Result]:
    """The cheapest schedule found under which no more than `budget_bytes` is reserved, and the
    variant of the step that it is of; raises `InfeasibleBudget`."""
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
    """The error for a budget within which no schedule was found to reserve no more."""
    return _refusal(prepared, budget_bytes, _Search(prepared, budget_bytes, effort).smallest())


class _Search:
    """One budget; remembers what the first limit has proven."""

    def __init__(self, prepared: PreparedStep, budget_bytes: int, effort: Effort) -> None:
        self.prepared, self.budget_bytes = prepared, budget_bytes
        self.first_effort = replace(effort, time_limit=effort.time_limit / 2)
        self.effort = replace(effort, time_limit=effort.time_limit / 2 / _SOLVES)
        self.bound = 0.0

    def lower(self, warm_start: Schedule | None) -> list[_Tried]:
        """All that fit, of schedules within one limit on what is allocated after another."""
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
        """Schedules that take little, whatever the budget."""
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
        """With what is proven for the budget, rather than for the limit that it was found with."""
        return replace(
            result, lower_bound=min(self.bound, result.cost),
            status=result.status if self._is_proven(result.cost) else "feasible")

    def _is_proven(self, cost: float) -> bool:
        return cost <= self.bound + PROOF_TOLERANCE * self.prepared.base.base_seconds

    def _within(self, limit_bytes: int, effort: Effort, warm_start: Schedule | None) -> _Tried:
        return self._tried(*schedule_within(self.prepared, limit_bytes, effort,
                                            warm_start=warm_start))

    def _known(self, variant: Variant, schedule: Schedule) -> _Tried | None:
        """A schedule of another size; `None` where it is none of this variant."""
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
