"""The best schedule and the best bound found so far."""

from __future__ import annotations

import math

from planner.solvers.actions import Order
from planner.solvers.incremental import drop_recomputes
from planner.solvers.lazy import lazy_schedule
from planner.solvers.minimum import Descent, minimum_peak
from planner.solvers.simulator import simulate
from planner.solvers.task import Proposal, Task

PROOF_TOLERANCE = 1e-8
"""Cost and bound that differ by less than this fraction of the keep-all cost count as equal."""


class Incumbent:
    """Collects schedules and bounds from all stages; mutable."""

    def __init__(self, task: Task) -> None:
        problem = task.problem
        self._task = task
        self.late = False
        """True if another search of the same problem may find another result."""
        self.interrupted = False
        """True if the user ended the search."""
        self.schedule = problem.keep_all_schedule
        self.peak_bytes, self.cost = simulate(problem, self.schedule)
        self.lower_bound = problem.keep_all_cost
        if task.warm_start is not None:
            self.offer(task.warm_start)

    @property
    def fits(self) -> bool:
        """True if a schedule within the budget is known."""
        return self.peak_bytes <= self._task.budget_bytes

    @property
    def proven(self) -> bool:
        """True if no schedule within the budget can cost less."""
        tolerance = PROOF_TOLERANCE * self._task.problem.keep_all_cost
        return self.fits and self.cost <= self.lower_bound + tolerance

    @property
    def gap(self) -> float:
        """Cost above the bound, as a fraction of the keep-all cost; infinite if nothing fits."""
        if not self.fits:
            return float("inf")
        plain = self._task.problem.keep_all_cost
        return (self.cost - self.lower_bound) / plain if plain else 0.0

    def offer(self, schedule: Order) -> int:
        """Keep a legal schedule if it is better; return its peak."""
        problem, budget = self._task.problem, self._task.budget_bytes
        schedule = drop_recomputes(problem, budget, schedule)
        peak, cost = simulate(problem, schedule)
        if peak <= budget:
            # Of equal schedules the first stays, so the choice does not depend on the time that the
            # search had.
            tolerance = PROOF_TOLERANCE * problem.keep_all_cost
            better = not self.fits or cost < self.cost - tolerance
        else:
            better = not self.fits and (peak, cost) < (self.peak_bytes, self.cost)
        if better:
            self.schedule, self.peak_bytes, self.cost = schedule, peak, cost
            self.late = self._task.seconds_left <= 0
        return peak

    def start(self) -> bool:
        """Find a schedule that fits, by a lazy walk or else by the search for the smallest peak,
        which alone decides that there is none.  Returns whether one was found."""
        task = self._task
        if not self.fits:
            found = lazy_schedule(task.problem, task.budget_bytes)
            if found is not None:
                self.offer(found)
        if not self.fits:
            self.offer(minimum_peak(
                task.problem, seed=task.seed, target_bytes=task.budget_bytes))
        self.report("first schedule")
        return self.fits

    def search_on(self) -> None:
        """Search for a schedule that fits until the deadline."""
        task = self._task
        descent = Descent(task.problem, task.seed, whole_work=math.inf)
        descent.reaches(task.budget_bytes, task.deadline)
        self.offer(descent.best)

    def raise_bound(self, extra_cost: float) -> None:
        """Record that every schedule within the budget recomputes for at least `extra_cost`."""
        self.lower_bound = max(self.lower_bound, self._task.problem.keep_all_cost + extra_cost)

    def report(self, stage: str) -> None:
        """Report the state of the search."""
        plain = self._task.problem.keep_all_cost or 1.0
        if self.fits:
            self._task.report(f"searching ({stage}): extra time {self.cost / plain - 1:.2%}, "
                              f"gap {self.gap:.2%}")
        else:
            self._task.report(f"searching ({stage}): no schedule within the budget yet")

    def proposal(self) -> Proposal:
        """The result of the search."""
        bound = min(self.lower_bound, self.cost) if self.fits else self.lower_bound
        return Proposal(self.schedule, bound, late=self.late or self.interrupted,
                        interrupted=self.interrupted)
