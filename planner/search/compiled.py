"""Planning a step that Inductor compiles: the solver proposes, the generated code decides.

The model of the world: the scheduling problem sees ops, and Inductor makes kernels of them; so what
a schedule takes in the problem and in the compiled step differ, by less than the budget matters but
not by nothing.  Each schedule is therefore judged by the code that Inductor generates for it
(`graph_capture.inductor.compiled_step`), and the budget that the solver is given moves until the
compiled step fills the user's budget as far as can be had.  What Inductor's own partitioner
recomputes without any budget is the starting point: it costs nothing beside the memory traffic that
it saves.

Blind spots: the proposals are those of the problem's costs, so a plan is not proven to be optimal.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import solvers.errors
from apply.recipe import Recipe
from planner.errors import InfeasibleBudget
from planner.plans.decisions import build_recipe
from planner.plans.plan import Plan
from planner.search.cheap_to_recompute import free_ops, saving_seconds, without_cheap, without_free
from planner.search.forms import solve_variant
from planner.search.planning import Effort, PreparedStep, keep_plan
from planner.search.saving import saved_buffers, schedule_saving
from planner.search.unified_blocks import with_fewer_decisions
from planner.step.accounting import MemoryByCategory
from planner.units import format_bytes
from solvers.problem import Schedule
from solvers.simulator import simulate, unroll

if TYPE_CHECKING:
    from graph_capture.inductor.compiled_step import CompiledStep

_ROUNDS = 4
"""Budgets that are tried on the solver for one plan, for each order of kernels, at most."""
_LEAST_ROUNDS = 2
"""The first of these are tried even after the time limit, the others where nothing fits so far or
what fits is wasteful."""
_CLOSE_ENOUGH = 0.02
"""Part of the budget that may be left unused."""
_WASTEFUL = 0.1
"""Part of the budget that may not be left unused while there are rounds."""
_MARGIN = 0.002
"""Part of the budget by which the next proposal is to stay below it."""
_SHARE_OF_SOLVER = 0.1
"""Part of the time limit that one proposal may take."""
_LEAST_SECONDS = 2.0
"""The search for the least memory may take so long, whatever the time limit (a U-Net of 700 ops
takes that); cut short, it misses by more than the next number."""
_SPREAD = 0.02
"""Part by which the smallest peak of one search may be missed by another: it stops by the clock."""
_NO_LESS = 0.95
"""Schedules whose peaks, by the problem's account, are nearer than this are not told apart by
it."""
_STRICTNESS = 0.03
"""Part of the step's time that the strict order of kernels takes (Llama at 60%)."""
_SIMPLICITY = 0.005
"""Part of the step's time that may be given for blocks that are treated alike."""
_SMALL = 0.002
"""Part of the budget for what is so small that it is saved where Inductor saves it by itself."""
_COST_OF_FREE = 1e-3
"""Part of its own cost that the solver sees of an op that is free to run again: enough to tell
schedules apart that are alike otherwise."""
_WORTH_TRYING = 1.1
"""A schedule that takes more than this times what it should, by the problem's account, is not
compiled."""


@dataclass(frozen=True)
class _Candidate:
    """A schedule and what its compiled step takes."""

    schedule: Schedule
    recipe: Recipe
    step: CompiledStep
    cost: float


class _Search:
    """The schedules tried for one step."""

    def __init__(self, prepared: PreparedStep, effort: Effort) -> None:
        assert prepared.compiled is not None
        self.prepared, self.effort = prepared, effort
        self.account = prepared.compiled
        self.graph, self.problem = prepared.graph, prepared.problem
        self.started = time.monotonic()
        self.costs = self.account.saving_costs
        self._default_schedule = schedule_saving(
            self.graph, self.problem, self.account.saved_by_default)
        self._solved: dict[int, Schedule] = {}

    @cached_property
    def worth_saving(self) -> frozenset[int]:
        """What Inductor saves by itself, less what is cheaper to compute again."""
        return without_cheap(
            self.graph, self.problem, self.account.saved_by_default, self.costs)

    @cached_property
    def free(self) -> frozenset[int]:
        """Ops that are free to run again where that is saved."""
        return free_ops(self.graph, self.problem, self.worth_saving)

    @cached_property
    def to_propose(self) -> PreparedStep:
        """The step with the problem that the solver sees."""
        return replace(self.prepared, problem=replace(self.problem, ops=tuple(
            replace(op, cost=_COST_OF_FREE * op.cost) if index in self.free else op
            for index, op in enumerate(self.problem.ops))))

    @cached_property
    def least(self) -> tuple[int, Schedule]:
        """The least that a schedule is known to take by the problem's own account, and that
        schedule; empty where it is not at hand."""
        seconds = max(self.effort.time_limit * _SHARE_OF_SOLVER, _LEAST_SECONDS)
        try:  # with the costs that ops have alone: another schedule beside those of `propose`
            return 0, solve_variant(
                self.prepared, 0, replace(self.effort, time_limit=seconds)).schedule
        except solvers.errors.InfeasibleBudget as refusal:
            return refusal.minimum_bytes, refusal.schedule

    @property
    def seconds_left(self) -> float:
        return self.effort.time_limit - (time.monotonic() - self.started)

    def default(self) -> _Candidate:
        """What Inductor does by itself."""
        return self.judge(self._default_schedule)

    def judge(self, schedule: Schedule, strict_order: bool = False) -> _Candidate:
        """Compile a step with this schedule and follow its memory."""
        recipe = build_recipe(
            self.graph, unroll(self.problem, schedule), tensors=self.prepared.tensors,
            training=self.prepared.training, overrides=self.prepared.overrides,
            low_peak=self.prepared.is_lean)
        recipe = replace(recipe, backend="inductor", strict_order=strict_order, regions=tuple(
            replace(region, inplace_reuses=()) for region in recipe.regions))
        if self.effort.progress is not None:
            self.effort.progress("generating the compiled step")
        return _Candidate(schedule, recipe, self.account.trace(recipe),
                          self.cost(schedule))

    def cost(self, schedule: Schedule) -> float:
        """Seconds of a step, by the problem's account, and of what it takes to save."""
        return simulate(self.problem, schedule).cost + saving_seconds(
            self.graph, self.problem, schedule, self.costs)

    def propose(self, net_bytes: int) -> tuple[Schedule, ...]:
        """Schedules within `net_bytes` by the problem's own account, most promising first."""
        return self.variants(self._solve(net_bytes), net_bytes)

    def _solve(self, net_bytes: int) -> Schedule:
        if net_bytes not in self._solved:
            share = self.effort.time_limit * _SHARE_OF_SOLVER
            self._solved[net_bytes] = solve_variant(
                self.to_propose, net_bytes, replace(self.effort, time_limit=share)).schedule
        return self._solved[net_bytes]

    def cost_within(self, net_bytes: int) -> float:
        """What the schedule costs that is most promising within `net_bytes`, by the problem's
        account; infinite where there is none."""
        try:
            return self.cost(self.propose(net_bytes)[0])
        except solvers.errors.InfeasibleBudget:
            return math.inf

    def variants(self, found: Schedule, net_bytes: int) -> tuple[Schedule, ...]:
        """The solver's schedule: without saving what is free to compute, where that is worth a try;
        then as it is, where that takes less memory."""
        saved = saved_buffers(self.graph, self.problem, found) | self.small(net_bytes)
        saved = without_free(self.graph, saved, self.free)
        saved = without_cheap(self.graph, self.problem, saved, self.costs)
        leaner = schedule_saving(self.graph, self.problem, saved)
        peaks = [simulate(self.problem, schedule).peak_bytes for schedule in (leaner, found)]
        if peaks[0] > _WORTH_TRYING * net_bytes:
            return (found,)
        return (leaner, found) if peaks[1] < _NO_LESS * peaks[0] else (leaner,)

    def small(self, net_bytes: int) -> frozenset[int]:
        """The smallest of what Inductor saves by itself, from which it makes larger results again.
        """
        sizes = sorted((self.graph.buffers[buffer].size_bytes, buffer)
                       for buffer in self.worth_saving)
        limits = accumulate(size for size, _ in sizes)
        return frozenset(buffer for (_, buffer), total in zip(sizes, limits, strict=True)
                         if total <= _SMALL * net_bytes)

    def within(self, net_bytes: int) -> _Candidate | None:
        """The cheapest candidate found whose compiled step takes at most `net_bytes`, where that of
        what Inductor does by itself takes more."""
        found = None if self.prepared.is_lean else self._narrow(net_bytes, strict_order=False)
        price = _STRICTNESS * self.problem.plain_cost
        # It is worth a try where it may gain as much as it takes.
        if found is None or found.cost > self.cost_within(net_bytes) + 2 * price:
            strict = self._narrow(net_bytes, strict_order=True)
            if strict is not None and (found is None or strict.cost + price < found.cost):
                found = strict
        if found is None:
            return None
        return self._simplified(self._filled(found, net_bytes), net_bytes)

    def _filled(self, found: _Candidate, net_bytes: int) -> _Candidate:
        """A candidate that puts what is left of the budget to use: it saves in addition what
        Inductor would save by itself, the smallest first."""
        left = net_bytes - int(_MARGIN * net_bytes) - found.step.peak_bytes
        limit = simulate(self.problem, found.schedule).peak_bytes + left
        saved = saved_buffers(self.graph, self.problem, found.schedule)
        missing = sorted(self.worth_saving - saved,
                         key=lambda buffer: (self.graph.buffers[buffer].size_bytes, buffer))

        def saving_more(count: int) -> Schedule:
            return schedule_saving(self.graph, self.problem, saved.union(missing[:count]))

        count = bisect(range(1, len(missing) + 1), limit, key=lambda count: simulate(
            self.problem, saving_more(count)).peak_bytes)
        if not count:
            return found
        fuller = self.judge(saving_more(count), found.recipe.strict_order)
        is_better = fuller.step.peak_bytes <= net_bytes and fuller.cost < found.cost
        return fuller if is_better else found

    def _simplified(self, found: _Candidate, net_bytes: int) -> _Candidate:
        """A candidate that treats more blocks alike, where these are compiled one by one and it
        fits as well."""
        if not found.recipe.blocks:
            return found
        left = net_bytes - found.step.peak_bytes
        schedule = with_fewer_decisions(
            self.graph, self.problem, found.schedule,
            peak_bytes=simulate(self.problem, found.schedule).peak_bytes + left,
            cost=simulate(self.problem, found.schedule).cost
            + _SIMPLICITY * self.problem.plain_cost)
        simpler = self.judge(schedule, found.recipe.strict_order)
        return simpler if simpler.step.peak_bytes <= net_bytes else found

    def _narrow(self, net_bytes: int, strict_order: bool) -> _Candidate | None:
        """The cheapest candidate found with one order of kernels."""
        internal = net_bytes
        low, high = 0, simulate(self.problem, self._default_schedule).peak_bytes
        # Budgets of the solver: `low` is known to fit or to be too small for it, `high` not to fit.
        best: _Candidate | None = None
        for number in range(_ROUNDS):
            is_good = best is not None and best.step.peak_bytes >= (1 - _WASTEFUL) * net_bytes
            if number >= _LEAST_ROUNDS and is_good and self.seconds_left <= 0:
                break
            try:
                candidate = self._best_of(self.propose(internal), net_bytes, strict_order)
            except solvers.errors.InfeasibleBudget as refusal:
                low = max(low, internal)
                internal = refusal.minimum_bytes
                if internal >= high:
                    break
                continue
            left = net_bytes - candidate.step.peak_bytes
            if left >= 0:
                if best is None or candidate.cost < best.cost:
                    best = candidate
                low = max(low, internal)
            else:
                high = min(high, internal)
            if (0 <= left <= _CLOSE_ENOUGH * net_bytes
                    or high - low <= _CLOSE_ENOUGH * net_bytes):
                break
            # The next proposal is taken to be as far from its own account as this one.
            internal += left - int(_MARGIN * net_bytes)
            if not low < internal < high:
                internal = (low + high) // 2
        return best

    def _best_of(self, schedules: Sequence[Schedule], net_bytes: int, strict_order: bool
                 ) -> _Candidate:
        """The first that fits, else the smallest."""
        tried: list[_Candidate] = []
        for schedule in schedules:
            tried.append(self.judge(schedule, strict_order))
            if tried[-1].step.peak_bytes <= net_bytes:
                return tried[-1]
        return min(tried, key=lambda candidate: candidate.step.peak_bytes)

    def smallest(self, net_bytes: int = 0) -> tuple[_Candidate, int]:
        """A candidate whose compiled step takes at most `net_bytes`, or else the least memory among
        those tried; and the bytes that a later search will find a candidate for."""
        least_bytes, schedule = self.least
        try:
            cheap = self.propose(least_bytes)
        except solvers.errors.InfeasibleBudget as refusal:
            if not schedule:
                raise
            cheap = (refusal.schedule,) if refusal.schedule else ()
        bare = (schedule,) if schedule else cheap
        found = self._best_of((*cheap, *bare), net_bytes, strict_order=True)
        # How well the cheap ones do depends on the time that the solver had.
        peak = min(self.judge(schedule, strict_order=True).step.peak_bytes for schedule in bare)
        return found, int((1 + _SPREAD) * max(peak, found.step.peak_bytes))


def plan_compiled(prepared: PreparedStep, budget_bytes: int | None, effort: Effort) -> Plan:
    """The cheapest plan found whose compiled step peaks within `budget_bytes`; raises
    `InfeasibleBudget`."""
    searches = [_Search(step, effort) for step in prepared.variants]
    default = searches[0].default()
    if budget_bytes is None:
        return _make_plan(searches[0], budget_bytes, default, searches[0])
    floor = prepared.optimizer_step_bytes
    net = budget_bytes - prepared.resident_bytes
    if net >= 0 and budget_bytes >= floor:
        if default.step.peak_bytes <= net:
            return _make_plan(searches[0], budget_bytes, default, searches[0])
        search, found = _cheapest(searches, net)
        if found is not None:
            return _make_plan(search, budget_bytes, found, searches[0])
    search, found, least = _smallest(searches, net)
    if found.step.peak_bytes > net or budget_bytes < floor:
        raise InfeasibleBudget(budget_bytes, max(prepared.resident_bytes + least, floor),
                               _describe(prepared, found.step))
    return _make_plan(search, budget_bytes, found, searches[0])


def smallest_plan(prepared: PreparedStep, effort: Effort) -> Plan:
    """The plan whose compiled step takes the least memory, among those tried."""
    searches = [_Search(step, effort) for step in prepared.variants]
    search, found, _ = _smallest(searches)
    return _make_plan(search, None, found, searches[0])


def _cheapest(searches: Sequence[_Search], net_bytes: int) -> tuple[_Search, _Candidate | None]:
    """The cheapest candidate found within `net_bytes`, and the search that found it.  Copies of
    gradients are for budgets near the least."""
    chosen, *others = searches
    found = chosen.within(net_bytes)
    for search in others:
        if found is None or (found.recipe.strict_order
                             and search.cost_within(net_bytes) < found.cost):
            other = search.within(net_bytes)
            if other is not None and (found is None or other.cost < found.cost):
                chosen, found = search, other
    return chosen, found


def _smallest(searches: Sequence[_Search], net_bytes: int = 0) -> tuple[_Search, _Candidate, int]:
    """As `_Search.smallest` over all variants that may take the least, by the problem's account;
    and the search that found the candidate."""
    least = min(search.least[0] for search in searches)
    tried: list[tuple[_Search, _Candidate, int]] = []
    for search in sorted(searches, key=lambda search: search.least[0]):
        if _NO_LESS * search.least[0] <= least:
            tried.append((search, *search.smallest(net_bytes)))
            if tried[-1][1].step.peak_bytes <= net_bytes:
                break
    search, found, _ = min(tried, key=lambda one: one[1].step.peak_bytes)
    return search, found, min(bytes_needed for *_, bytes_needed in tried)


def _make_plan(search: _Search, budget_bytes: int | None, found: _Candidate, plain: _Search
               ) -> Plan:
    """The plan of a candidate of one search; `plain` is the search among schedules without copies.
    """
    prepared, plain_cost = search.prepared, plain.problem.plain_cost
    default = plain.default()
    forward_backward = prepared.resident_bytes + found.step.peak_bytes
    plan = keep_plan(prepared, budget_bytes, found.schedule, search.effort.solver,
                     time.monotonic() - plain.started)
    memory = plan.memory
    if forward_backward >= prepared.optimizer_step_bytes:
        memory = _memory(prepared, found.step)
    # What an estimate takes for a gain, the machine may not.
    extra = max(0.0, (found.cost - default.cost) / plain_cost) if plain_cost else 0.0
    if prepared.cost_model == "measured" and found.recipe != default.recipe:
        extra = search.account.seconds(found.recipe) / plain.account.seconds(
            default.recipe) - 1
    return replace(
        plan, peak_bytes=memory.total_bytes, memory=memory,
        forward_backward_peak_bytes=forward_backward, overhead=extra,
        overhead_bound=min(0.0, extra), status="feasible",
        recipe=search.account.with_code(found.recipe),
        notes=(*plan.notes, "without a budget the compiled step peaks at "
               f"{prepared.resident_bytes + default.step.peak_bytes} bytes; overhead is relative "
               "to that step"))


def _memory(prepared: PreparedStep, step: CompiledStep) -> MemoryByCategory:
    resident = prepared.graph.resident
    made = {kind.value: size for kind, size in step.by_category.items()}
    return MemoryByCategory(
        parameters=resident.parameters_bytes, buffers=resident.buffers_bytes,
        inputs=resident.inputs_bytes,
        optimizer=0 if prepared.optimizer is None else prepared.optimizer.state_bytes,
        **{**made, "gradients": made.get("gradients", 0) + resident.gradients_bytes})


def _describe(prepared: PreparedStep, step: CompiledStep) -> str:
    """What holds the memory of the smallest step that was found."""
    parts = ", ".join(f"{category} {format_bytes(size)}"
                      for category, size in _memory(prepared, step).items() if size)
    return f"At that minimum the compiled step holds {parts}."
