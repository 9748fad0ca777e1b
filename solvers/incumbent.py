"""The best schedule and the best bound found so far."""

from __future__ import annotations

import math
import time

from solvers.actions import Order
from solvers.lazy import lazy_schedule
from solvers.local_search import repair
from solvers.minimum import Descent, working_set_floor
from solvers.polish import drop_recomputes
from solvers.simulator import simulate
from solvers.task import Proposal, Task

GRACE_SECONDS = 2.0
"""Time for finding any schedule that fits, even if the time limit is over."""
FIT_WORK = 4.0
"""Work of a first search for a schedule that fits, see `solvers.minimum.Descent`."""
REFUSAL_SECONDS = 4.0
"""At most this long is the smallest peak searched for where the budget cannot be met."""
MOVE_SECONDS = 4e-5
"""What a move of local search takes, about."""
NEAR_MISS = 0.03
"""A peak over the budget by no more than this fraction is worth all the time that is left."""
PROOF_TOLERANCE = 1e-8
"""Cost and bound that differ by less than this fraction of the keep-all cost are equal."""


class Incumbent:
    """Collects schedules and bounds from whatever finds them; mutable."""

    def __init__(self, task: Task) -> None:
        problem = task.problem
        self._task = task
        self._descent = Descent(problem, task.seed, task.budget_bytes)
        self._promised = self._gave_up = False
        self._timed = False
        """Whether what is done depends on how fast the machine is."""
        self.late = False
        """Whether the schedule does: something else may be found when all is done again."""
        self.schedule = problem.keep_all_schedule
        self.peak_bytes, self.cost = simulate(problem, self.schedule)
        self.lower_bound = problem.keep_all_cost
        if task.warm_start is not None:
            self.offer(task.warm_start)

    @property
    def fits(self) -> bool:
        """Whether a schedule within the budget is known."""
        return self.peak_bytes <= self._task.budget_bytes

    @property
    def proven(self) -> bool:
        """Whether no schedule within the budget can cost less."""
        tolerance = PROOF_TOLERANCE * self._task.problem.keep_all_cost
        return self.fits and self.cost <= self.lower_bound + tolerance

    @property
    def gap(self) -> float:
        """Cost above the bound, as a fraction of the keep-all cost; infinite where nothing fits."""
        if not self.fits:
            return float("inf")
        plain = self._task.problem.keep_all_cost
        return (self.cost - self.lower_bound) / plain if plain else 0.0

    def offer(self, schedule: Order) -> int:
        """Take a legal schedule if it is better; its peak."""
        problem, budget = self._task.problem, self._task.budget_bytes
        schedule = drop_recomputes(problem, budget, schedule)
        peak, cost = simulate(problem, schedule)
        if peak <= budget:
            # Of equal schedules the first stays: which one it is then does not depend on how much
            # of the search there was time for.
            tolerance = PROOF_TOLERANCE * problem.keep_all_cost
            better = not self.fits or cost < self.cost - tolerance
        else:
            better = not self.fits and (peak, cost) < (self.peak_bytes, self.cost)
        if better:
            self.schedule, self.peak_bytes, self.cost = schedule, peak, cost
            self.late = self._timed or self._task.seconds_left <= 0
        return peak

    @property
    def possible(self) -> bool:
        """Whether the working sets fit; where they do not, no schedule does."""
        return working_set_floor(self._task.problem) <= self._task.budget_bytes

    def start(self) -> None:
        """Offer a lazy schedule, which takes no time to speak of; where no schedule can fit, look
        for the smallest peak instead."""
        if not self.possible:
            self.ensure_fit()
        elif not self.fits:
            found = lazy_schedule(self._task.problem, self._task.budget_bytes)
            if found is not None:
                self.offer(found)

    def ensure_fit(self, *, last: bool = True) -> bool:
        """Where nothing fits yet, look for a smaller peak: for a while or, if this is the `last`
        attempt, for all the time that is left and a little more, since a budget that can be met
        must be met.  Whether something fits."""
        if self.fits or self._gave_up:
            return self.fits
        self._gave_up = last
        budget, left, begin = self._task.budget_bytes, self._task.seconds_left, time.monotonic()
        seconds = max(GRACE_SECONDS, left) if self.possible else min(3 * REFUSAL_SECONDS, left)
        work = self._task.work_limit
        if work is not None:
            seconds = max(GRACE_SECONDS, left)
        descent = self._descent
        if not self._promised:
            # What a third of the time finds is what a refusal promises: planning with it, which has
            # all of the time for the same search, then meets it on a slower machine, too.
            self._promised = True
            self._timed |= descent.run(begin + seconds / 3, FIT_WORK)
            self.offer(descent.best)
        if last and self.possible and descent.best_peak > budget:
            self._timed |= descent.run(begin + seconds * 2 / 3, math.inf if work is None else work)
            if descent.best_peak <= budget:
                self.offer(descent.best)
            elif descent.best_peak <= budget * (1 + NEAR_MISS):
                rest = begin + seconds - time.monotonic()
                self._timed |= work is None or rest <= 0
                found = repair(self._task.problem, budget, descent.best, time_limit=rest,
                               seed=self._task.seed,
                               moves=None if work is None else int(work / MOVE_SECONDS))
                if found is not None:
                    self.offer(found)
        return self.fits

    def raise_bound(self, extra_cost: float) -> None:
        """Note that every schedule within the budget recomputes for at least `extra_cost`."""
        self.lower_bound = max(self.lower_bound, self._task.problem.keep_all_cost + extra_cost)

    def report(self, stage: str) -> None:
        """Tell where the search stands."""
        plain = self._task.problem.keep_all_cost or 1.0
        if self.fits:
            self._task.report(f"searching ({stage}): extra time {self.cost / plain - 1:.2%}, "
                              f"gap {self.gap:.2%}")
        else:
            self._task.report(f"searching ({stage}): no schedule within the budget yet")

    def proposal(self) -> Proposal:
        """What was found."""
        bound = min(self.lower_bound, self.cost) if self.fits else self.lower_bound
        return Proposal(self.schedule, bound, late=self.late)
