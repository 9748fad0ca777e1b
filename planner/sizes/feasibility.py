"""Find the largest size for which a plan within a budget exists.

Model of the world: the same model at another size has the same ops in the same order, only larger;
so a schedule found at one size can be tried at another, at no cost.  Otherwise the search for the
smallest peak decides, as for `InfeasibleBudget.minimum_bytes`; with a limit on the extra time, the
solver does.
"""

from __future__ import annotations

import math

from planner.errors import InfeasibleBudget
from planner.search.effort import Effort
from planner.search.reserved import schedule_reserving
from planner.search.variants import cheapest, smallest
from planner.sizes.bracketing import Bracket, find_largest, secant
from planner.sizes.sized_steps import SizedSteps
from planner.solvers.actions import as_order
from planner.solvers.errors import InfeasibleBudget as Refusal
from planner.solvers.minimum import minimum_peak
from planner.solvers.problem import Problem, Schedule
from planner.solvers.simulator import IllegalSchedule, simulate
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant
from planner.units import format_fraction


class Feasibility:
    """Answers by number, in multiples of `multiple_of`; mutable, since it caches them."""

    def __init__(self, steps: SizedSteps, budget_bytes: int, multiple_of: int = 1, *,
                 overhead: float | None = None, effort: Effort) -> None:
        self._steps, self._budget_bytes, self._multiple_of = steps, budget_bytes, multiple_of
        self._overhead_limit, self._effort = overhead, effort
        self.schedules: dict[int, Schedule] = {}
        """A schedule within the budget and the limit on overhead, if known."""
        self.minimum_bytes: dict[int, int] = {}
        """The smallest budget known to be feasible at a number that was searched."""
        self._overheads: dict[int, float] = {}  # the least known within the budget
        self._proven: set[int] = set()  # numbers at which no plan exists
        self._small: list[Schedule] = []  # schedules of small peaks

    def largest(self, first: int, last: int, known: Bracket) -> Bracket:
        """The largest number from `first` to `last` with a plan; the search begins at `known`, the
        result for the plain step."""
        start = first if known.low is None else known.low
        bracket = find_largest(self.fits, self._guess, start, last)
        if bracket.low is None and start > first:
            below = find_largest(self.fits, self._guess, first, start - 1)
            return Bracket(below.low, below.high if below.low != start - 1 else bracket.high)
        return bracket

    def is_proven(self, number: int | None) -> bool:
        """True if it is proven that no plan exists."""
        return number in self._proven

    def least_overhead(self, number: int) -> float | None:
        """The least extra time of the plans found within the budget; `None` if none was found."""
        return self._overheads.get(number)

    def fits(self, number: int) -> bool | None:
        """True if a plan is known or found at the number; `None` if the step cannot be captured."""
        step = self._steps.at(number * self._multiple_of)
        if step is None:
            return None
        if not step.may_fit(self._budget_bytes):
            self._proven.add(number)
            return False
        return self._fits_known(number, step) or self._search(number, step)

    def _fits_known(self, number: int, step: PreparedStep) -> bool:
        """True if a schedule of another size fits."""
        return any(
            self._accept(number, step, variant, schedule) for variant in step.variants
            for schedule in (variant.problem.keep_all_schedule, *self.schedules.values(),
                             *self._small)
            if _transfers(schedule, variant.problem))

    def _search(self, number: int, step: PreparedStep) -> bool:
        limit, net_bytes = self._overhead_limit, step.budget.net_bytes(self._budget_bytes)
        if step.budget_of == "reserved":
            try:
                variant, result = schedule_reserving(step, self._budget_bytes, self._effort)
            except InfeasibleBudget as refusal:
                self.minimum_bytes[number] = refusal.minimum_bytes
                return False
            schedule = result.schedule
        elif limit is None:
            variant, schedule = smallest(step.variants, net_bytes)
            self._small.append(schedule)
            self.minimum_bytes[number] = variant.peak_bytes(schedule)
        else:
            variant, found = cheapest(step.variants, net_bytes, self._effort)
            schedule = found.schedule
            if isinstance(found, Refusal):
                self.minimum_bytes[number] = step.budget.whole_bytes(found.minimum_bytes)
                return False
            if found.overhead_bound > limit:
                self._proven.add(number)
        return self._accept(number, step, variant, schedule)

    def _accept(self, number: int, step: PreparedStep, variant: Variant, schedule: Schedule
                ) -> bool:
        """Record a schedule's overhead; return whether it is within the limits."""
        peak, cost = simulate(variant.problem, schedule)
        if peak > step.budget.net_bytes(self._budget_bytes) or (step.budget_of == "reserved" and (
                step.takes_bytes(variant, schedule) > self._budget_bytes)):
            return False
        base = variant.base_seconds
        overhead = (cost - base) / base if base else 0.0
        self._overheads[number] = min(overhead, self._overheads.get(number, math.inf))
        if self._overhead_limit is not None and overhead > self._overhead_limit:
            return False
        self.schedules[number] = schedule
        if self._effort.progress is not None:
            self._effort.progress(f"{number * self._multiple_of} fits with a plan "
                                  f"({format_fraction(overhead)} extra time)")
        return True

    def _guess(self) -> float | None:
        if self._overhead_limit is None:
            return self._guess_by_memory()
        # Overhead grows approximately as a power of the size.
        points = {number: math.log(overhead) for number, overhead in self._overheads.items()
                  if overhead > 0}
        limit = self._overhead_limit
        if len(points) < 2 or limit <= 0:
            return None
        scaled = {round(2 ** 20 * math.log(number)): value for number, value in points.items()}
        reached = secant(scaled, math.log(limit))
        return None if reached is None or reached > 2 ** 24 else math.exp(reached / 2 ** 20)

    def _guess_by_memory(self) -> float | None:
        """The number at which the smallest known schedules reach the budget, interpolated from two
        sizes."""
        captured = {size // self._multiple_of: step
                    for size, step in self._steps.captured.items()}
        if not self._small and len(captured) > 1:
            number = max(captured)
            self._small.append(minimum_peak(captured[number].base.problem))
        guesses = []
        for schedule in self._small:
            peaks = {number: float(variant.peak_bytes(schedule))
                     for number, step in captured.items() for variant in step.variants
                     if _transfers(schedule, variant.problem)}
            guesses.append(secant(peaks, self._budget_bytes))
        return max((guess for guess in guesses if guess is not None), default=None)


def _transfers(schedule: Schedule, problem: Problem) -> bool:
    """True if a schedule of another size is legal for this problem: it has the same number of
    ops."""
    if max(as_order(schedule)) + 1 != len(problem):
        return False
    try:
        simulate(problem, schedule)
    except IllegalSchedule:
        return False
    return True
