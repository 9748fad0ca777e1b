"""Planning a step that Inductor compiles: the solver proposes, the generated code decides.

The model of the world: the scheduling problem sees ops, and Inductor makes kernels of them; so what
a schedule takes in the problem and in the compiled step differ, by less than the budget matters but
not by nothing.  Each schedule is therefore judged by the code that Inductor generates for it
(`graph_capture.compiled_step`), and the budget that the solver is given moves until the compiled
step fills the user's budget as far as can be had.  What Inductor's own partitioner recomputes
without any budget is the starting point: it costs nothing beside the memory traffic that it saves.

Blind spots: the proposals are those of the problem's costs, so a plan is not proven to be optimal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import solvers.errors
from apply.recipe import Recipe
from planner.accounting import MemoryByCategory
from planner.decisions import build_recipe
from planner.errors import InfeasibleBudget
from planner.fewer_decisions import with_fewer_decisions
from planner.plan import Plan
from planner.planning import Effort, PreparedStep, keep_plan
from planner.saving import free_ops, saved_buffers, schedule_saving, without_free
from planner.units import format_bytes
from planner.variants import solve_variant
from solvers.problem import Schedule
from solvers.simulator import simulate, unroll

if TYPE_CHECKING:
    from graph_capture.compiled_step import CompiledStep

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
_SPREAD = 0.02
"""Part by which the smallest peak of one search may be missed by another: it stops by the clock."""
_NO_LESS = 0.95
"""Schedules whose peaks, by the problem's account, are nearer than this are not told apart by
it."""
_SIMPLICITY = 0.005
"""Part of the step's time that may be given for blocks that are treated alike."""
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
        self.free = free_ops(self.graph, self.problem, self.account.saved_by_default)

    @property
    def seconds_left(self) -> float:
        return self.effort.time_limit - (time.monotonic() - self.started)

    def default(self) -> _Candidate:
        """What Inductor does by itself."""
        return self.judge(schedule_saving(self.graph, self.problem, self.account.saved_by_default))

    def judge(self, schedule: Schedule, strict_order: bool = False) -> _Candidate:
        """Compile a step with this schedule and follow its memory."""
        recipe = build_recipe(
            self.graph, unroll(self.problem, schedule), tensors=self.prepared.tensors,
            training=self.prepared.training, overrides=self.prepared.overrides)
        recipe = replace(recipe, backend="inductor", strict_order=strict_order, regions=tuple(
            replace(region, takeovers=()) for region in recipe.regions))
        if self.effort.progress is not None:
            self.effort.progress("generating the compiled step")
        return _Candidate(schedule, recipe, self.account.trace(recipe),
                          simulate(self.problem, schedule).cost)

    def propose(self, net_bytes: int) -> tuple[Schedule, ...]:
        """Schedules within `net_bytes` by the problem's own account, most promising first."""
        share = self.effort.time_limit * _SHARE_OF_SOLVER
        found = solve_variant(self.prepared, net_bytes, replace(self.effort, time_limit=share))
        return self.variants(found.schedule, net_bytes)

    def variants(self, found: Schedule, net_bytes: int) -> tuple[Schedule, ...]:
        """The solver's schedule: without saving what is free to compute, where that is worth a try;
        then as it is, where that takes less memory."""
        saved = without_free(self.graph, saved_buffers(self.graph, self.problem, found), self.free)
        leaner = schedule_saving(self.graph, self.problem, saved)
        peaks = [simulate(self.problem, schedule).peak_bytes for schedule in (leaner, found)]
        if peaks[0] > _WORTH_TRYING * net_bytes:
            return (found,)
        return (leaner, found) if peaks[1] < _NO_LESS * peaks[0] else (leaner,)

    def within(self, net_bytes: int) -> _Candidate | None:
        """The cheapest candidate found whose compiled step takes at most `net_bytes`."""
        first = self.default()
        if first.step.peak_bytes <= net_bytes:
            return first
        for strict_order in (False, True):
            found = self._narrow(net_bytes, first, strict_order)
            if found is not None:
                return self._simplified(found, net_bytes)
        return None

    def _simplified(self, found: _Candidate, net_bytes: int) -> _Candidate:
        """A candidate that treats more blocks alike, where these are compiled one by one and it
        fits as well."""
        if not found.recipe.blocks:
            return found
        left = net_bytes - found.step.peak_bytes
        schedule = with_fewer_decisions(
            self.graph, self.problem, found.schedule,
            peak_bytes=simulate(self.problem, found.schedule).peak_bytes + left,
            cost=found.cost + _SIMPLICITY * self.problem.plain_cost)
        simpler = self.judge(schedule, found.recipe.strict_order)
        return simpler if simpler.step.peak_bytes <= net_bytes else found

    def _narrow(self, net_bytes: int, first: _Candidate, strict_order: bool) -> _Candidate | None:
        """The cheapest candidate found with one order of kernels."""
        internal = net_bytes
        low, high = 0, simulate(self.problem, first.schedule).peak_bytes
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
        try:
            cheap = bare = self.propose(0)
        except solvers.errors.InfeasibleBudget as refusal:
            cheap = self.propose(refusal.minimum_bytes)
            bare = (refusal.schedule,) if refusal.schedule else cheap
        found = self._best_of((*cheap, *bare), net_bytes, strict_order=True)
        # How well the cheap ones do depends on the time that the solver had.
        peak = min(self.judge(schedule, strict_order=True).step.peak_bytes for schedule in bare)
        return found, int((1 + _SPREAD) * max(peak, found.step.peak_bytes))


def plan_compiled(prepared: PreparedStep, budget_bytes: int | None, effort: Effort) -> Plan:
    """The cheapest plan found whose compiled step peaks within `budget_bytes`; raises
    `InfeasibleBudget`."""
    search = _Search(prepared, effort)
    if budget_bytes is None:
        return _make_plan(search, budget_bytes, search.default())
    floor = prepared.optimizer_step_bytes
    net = budget_bytes - prepared.resident_bytes
    found = search.within(net) if net >= 0 and budget_bytes >= floor else None
    if found is None:
        found, least = search.smallest(net)
        if found.step.peak_bytes > net or budget_bytes < floor:
            raise InfeasibleBudget(budget_bytes, max(prepared.resident_bytes + least, floor),
                                   _describe(prepared, found.step))
    return _make_plan(search, budget_bytes, found)


def smallest_plan(prepared: PreparedStep, effort: Effort) -> Plan:
    """The plan whose compiled step takes the least memory, among those tried."""
    search = _Search(prepared, effort)
    return _make_plan(search, None, search.smallest()[0])


def _make_plan(search: _Search, budget_bytes: int | None, found: _Candidate) -> Plan:
    prepared, problem = search.prepared, search.problem
    default = search.default()
    forward_backward = prepared.resident_bytes + found.step.peak_bytes
    plan = keep_plan(prepared, budget_bytes, found.schedule, search.effort.solver,
                     time.monotonic() - search.started)
    memory = plan.memory
    if forward_backward >= prepared.optimizer_step_bytes:
        memory = _memory(prepared, found.step)
    recomputed = (found.cost - default.cost) / problem.plain_cost if problem.plain_cost else 0.0
    if prepared.cost_model == "measured" and found.recipe != default.recipe:
        recomputed = search.account.seconds(found.recipe) / search.account.seconds(
            default.recipe) - 1
    return replace(
        plan, peak_bytes=memory.total_bytes, memory=memory,
        forward_backward_peak_bytes=forward_backward, overhead=max(0.0, recomputed),
        overhead_bound=0.0, status="feasible",
        recipe=search.account.with_code(found.recipe),
        notes=(*plan.notes, "compiled by Inductor without a plan the step peaks at "
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
