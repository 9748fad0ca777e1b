"""Schedules worth compiling, by the scheduling problem's breakdown alone.

The solver's schedules are made for ops; here they are adapted to kernels: a result that Inductor
recomputes for free, or for less than the cost of saving it, is not saved.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from planner.search.cheap_to_recompute import free_ops, saving_seconds, without_cheap, without_free
from planner.search.effort import Effort
from planner.search.fused_bound import least_cost
from planner.search.saving import saved_buffers, schedule_saving
from planner.search.time_left import TimeLeft
from planner.search.variants import solve_variant
from planner.solvers.errors import InfeasibleBudget as Refusal
from planner.solvers.problem import Schedule
from planner.solvers.result import Result
from planner.step.variant import Variant

NO_LESS = 0.95
"""Schedules whose peaks, by the problem's breakdown, have a ratio above this count as equal."""
_SHARE_OF_SOLVER = 0.1
"""Fraction of the time limit for one proposal, counted as work, so that proposals are the same on a
slower or busy machine."""
_LEAST_SECONDS = 2.0
"""Time for the search for the least memory, whatever the time limit (a U-Net of 700 ops needs it);
cut short, its error exceeds the difference between two such searches."""
_SMALL = 0.002
"""Fraction of the budget for small buffers that are saved because Inductor saves them by
default."""
_COST_OF_FREE = 1e-3
"""Fraction of its cost that the solver counts for an op that is free to recompute: enough to break
ties between schedules."""
_LESS = 0.01
"""The solver is first asked for a budget lower by this fraction.  With repeated layers it may find
a cheaper schedule there by chance: .0106 of a step within 327 MB of Llama, .0154 within 330."""
_WORTH_TRYING = 1.1
"""A schedule that exceeds its budget by more than this factor, by the problem's breakdown, is not
compiled."""


class Proposals:
    """The solver's proposals for one graph variant of a step; mutable, since it caches them."""

    def __init__(self, variant: Variant, effort: Effort, time_left: TimeLeft) -> None:
        """A deadline ends a proposal's search, but not before the work that it is entitled to on an
        idle machine."""
        assert variant.compiled is not None
        self.variant, self.effort, self._time_left = variant, effort, time_left
        self.default = schedule_saving(variant, variant.compiled.saved_by_default)
        """Inductor's default."""
        self._saved_by_default = variant.compiled.saved_by_default
        self._costs = variant.compiled.saving_costs
        self._solved: dict[int, Result] = {}
        """The solver's results for the problem that it sees, by net bytes."""
        self.solver_seconds = 0.0
        """The longest time that the solver needed for one budget."""
        self._costs_nothing = False
        """True if some proposal costs no more than Inductor's default."""
        self._refused_bytes = -1
        """The most net bytes known to be infeasible."""

    @cached_property
    def costly(self) -> frozenset[int]:
        """Buffers that Inductor saves by default, without those that are cheap to recompute."""
        return without_cheap(self.variant, self._saved_by_default, self._costs)

    @cached_property
    def least(self) -> tuple[int, Schedule]:
        """The least net bytes of a known schedule, by the problem's own breakdown, and that
        schedule; empty if it is not available."""
        try:  # with unfused costs: a schedule other than those of `within`
            return 0, self._ask(self.variant, 0, _LEAST_SECONDS).schedule
        except Refusal as refusal:
            return refusal.minimum_bytes, refusal.schedule

    def cost(self, schedule: Schedule) -> float:
        """Seconds of a step by the problem's costs, plus the cost of saving."""
        return self.variant.cost(schedule) + saving_seconds(self.variant, schedule, self._costs)

    def cost_within(self, net_bytes: int) -> float:
        """Cost of the most promising schedule within `net_bytes`; infinite if there is none."""
        try:
            return self.cost(self.within(net_bytes)[0])
        except Refusal:
            return math.inf

    def within(self, net_bytes: int) -> tuple[Schedule, ...]:
        """Schedules within `net_bytes`, the most promising first: the solver's schedule without
        saving results that are free to recompute, if that is worth a try; then the solver's
        schedule itself, if it uses less memory.

        Raises `solvers.InfeasibleBudget`.
        """
        found = self._solve(net_bytes)
        saved = saved_buffers(self.variant, found) | self._small(net_bytes)
        saved = without_free(self.variant.graph, saved, self._free)
        saved = without_cheap(self.variant, saved, self._costs)
        cheap = schedule_saving(self.variant, saved)
        self._costs_nothing |= self.cost(cheap) <= self.cost(self.default)
        peaks = [self.variant.net_peak_bytes(schedule) for schedule in (cheap, found)]
        if peaks[0] > _WORTH_TRYING * net_bytes:
            return (found,)
        return (cheap, found) if peaks[1] < NO_LESS * peaks[0] else (cheap,)

    @cached_property
    def _free(self) -> frozenset[int]:
        """Ops that are free to recompute if the costly buffers are saved."""
        return free_ops(self.variant, self.costly)

    @cached_property
    def _priced(self) -> Variant:
        """The variant with the problem that the solver sees."""
        problem = self.variant.problem
        return replace(self.variant, problem=replace(problem, ops=tuple(
            replace(op, cost=_COST_OF_FREE * op.cost) if index in self._free else op
            for index, op in enumerate(problem.ops))))

    def _solve(self, net_bytes: int) -> Schedule:
        if net_bytes not in self._solved:
            start = self._cheapest_known(net_bytes)
            is_worth = not self._costs_nothing and time.monotonic() < self._time_left.deadline
            if start is None and is_worth:
                start = self._within_less(net_bytes)
            self._solved[net_bytes] = self._ask(self._priced, net_bytes, start=start)
        return self._solved[net_bytes].schedule

    def gain_within(self, net_bytes: int) -> float:
        """Upper bound on the gain of a schedule within `net_bytes` over the result for the largest
        smaller budget, assuming diminishing returns of memory; infinite if fewer than two results
        are known."""
        asked = sorted(budget for budget in self._solved if budget <= net_bytes)
        if len(asked) < 2:
            return math.inf
        less, most = (self._solved[budget] for budget in asked[-2:])
        slope = max(0.0, less.cost - most.cost, less.lower_bound - most.lower_bound) / (
            asked[-1] - asked[-2])
        return most.cost - most.lower_bound + slope * (net_bytes - asked[-1])

    def _cheapest_known(self, net_bytes: int) -> Schedule | None:
        """The cheapest known schedule that fits."""
        fitting = (found for found in self._solved.values() if found.peak_bytes <= net_bytes)
        cheapest = min(fitting, key=lambda found: found.cost, default=None)
        return None if cheapest is None else cheapest.schedule

    def _within_less(self, net_bytes: int) -> Schedule | None:
        """The solver's schedule for a slightly smaller budget, if any."""
        less = int((1 - _LESS) * net_bytes)
        if less <= self._refused_bytes:
            return None
        try:
            self._solved[less] = self._ask(self._priced, less)
        except Refusal:
            return None
        return self._solved[less].schedule

    def _ask(self, variant: Variant, net_bytes: int, least_seconds: float = 0.0,
             start: Schedule | None = None) -> Result:
        effort = self.effort
        work = max(_SHARE_OF_SOLVER * (effort.work_limit or effort.time_limit), least_seconds)
        begun = time.monotonic()
        seconds = max(self._time_left.deadline - begun, work)
        try:
            return solve_variant(variant, net_bytes, replace(effort, time_limit=seconds), start,
                                 work_limit=work)
        except Refusal as refusal:
            self._refused_bytes = max(self._refused_bytes, net_bytes, refusal.minimum_bytes - 1)
            raise
        finally:
            self.solver_seconds = max(self.solver_seconds, time.monotonic() - begun)

    def least_cost_within(self, net_bytes: int) -> float:
        """Lower bound on the cost of any schedule within `net_bytes`, by the problem's costs."""
        effort = self.effort
        # Two breakdowns may be queried, so each gets half of a proposal's time.
        share = _SHARE_OF_SOLVER / 2 * (effort.work_limit or effort.time_limit)
        seconds = max(self._time_left.deadline - time.monotonic(), share)
        return least_cost(self.variant, net_bytes, self._costs.to_save, seconds)

    def _small(self, net_bytes: int) -> frozenset[int]:
        """The smallest buffers that Inductor saves by default to recompute larger results from."""
        sizes = sorted((self.variant.graph.buffers[buffer].size_bytes, buffer)
                       for buffer in self.costly)
        limits = accumulate(size for size, _ in sizes)
        return frozenset(buffer for (_, buffer), total in zip(sizes, limits, strict=True)
                         if total <= _SMALL * net_bytes)
