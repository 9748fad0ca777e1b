"""Planning a step that Inductor compiles: the solver proposes, the generated code decides.

The model of the world: the scheduling problem sees ops, and Inductor makes kernels of them; so what
a schedule takes in the problem and in the compiled step differ, by less than the budget matters but
not by nothing.  Each schedule is therefore judged by the code that Inductor generates for it
(`graph_capture.inductor.compiled_step`), and the budget that the solver is given moves until the
compiled step fills the user's budget as far as can be had.  What Inductor's own partitioner
recomputes without any budget is the starting point: it costs nothing beside the memory traffic that
it saves.

Work is counted, not timed: the same step and budget give the same plan on a busy machine, unless
the time limit strikes; then the best plan so far is taken, which says so.

Blind spots: what is proven (`planner.search.fused_bound`) is proven under the problem's costs.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from apply.recipe import Recipe
from graph_capture.training_graph import BufferKind, Phase
from planner.plans.decisions import build_recipe
from planner.plans.making import assemble_plan
from planner.plans.plan import Plan
from planner.search.effort import Effort
from planner.search.forms import choose
from planner.search.proposals import NO_LESS, Proposals
from planner.search.saving import saved_buffers, schedule_saving
from planner.search.unified_blocks import unify_blocks
from planner.step.accounting import memory_over
from planner.step.form import Form
from planner.step.prepared import PreparedStep
from planner.units import format_bytes
from solvers.errors import InfeasibleBudget as Refusal
from solvers.incumbent import PROOF_TOLERANCE
from solvers.problem import Schedule
from solvers.simulator import unroll

if TYPE_CHECKING:
    from graph_capture.inductor.compiled_step import CompiledStep

_ROUNDS = 4
"""Budgets that are tried on the solver for one plan, for each order of kernels, at most."""
_CLOSE_ENOUGH = 0.02
"""Part of the budget that may be left unused."""
_MARGIN = 0.002
"""Part of the budget by which the next proposal is to stay below it."""
_WORTH_GENERATING = 1.5
"""The code of what Inductor does by itself is not generated where that takes more than this times
the budget, by the problem's account."""
_SPREAD = 0.02
"""Part by which the smallest peak of one search may be missed by another: it stops by the clock."""
_STRICTNESS = 0.03
"""Part of the step's time that the strict order of kernels takes (Llama at 60%)."""
CUT_OFF = ("the time limit cut the search off, and this is the best that was found until then: a "
           "longer one, or a machine that does less beside, may find a better plan")
"""A note of such plans."""
_GRACE = 0.5
"""Part of the time limit by which it may be overrun for what has been begun."""
_CONFIRMATIONS = 3
"""Whole steps that are compiled for one form, at most, because what was expected does not fit."""
_SIMPLICITY = 0.005
"""Part of the step's time that may be given for blocks that are treated alike."""


@dataclass(frozen=True)
class _Candidate:
    """A schedule and what its compiled step takes."""

    schedule: Schedule
    recipe: Recipe
    step: CompiledStep
    cost: float


class _Search:
    """The schedules tried for one form of a step."""

    def __init__(self, prepared: PreparedStep, form: Form, effort: Effort) -> None:
        assert form.compiled is not None
        self.prepared, self.form, self.effort = prepared, form, effort
        self.account = form.compiled
        self.started = self._try_ended = time.monotonic()
        self._latest = self.started + (1 + _GRACE) * effort.time_limit
        """When all is to be done."""
        self._try_seconds = 0.0
        """What a try took, with its proposal, at most."""
        self.proposals = Proposals(form, effort)
        self.was_cut_off = False
        """Whether the time limit kept anything from being tried."""
        self._beside: dict[bool, int] = {}
        """What a whole step that did not fit took beside the account, by the order of kernels."""
        self.overstated_bytes = 0
        """By how much, at most, the problem's account was above that of the code; what Inductor
        does by itself, which is fullest elsewhere, left aside."""

    def is_late(self) -> bool:
        """Whether there is no time for another try, which is then left out: the limit has struck,
        or a try would leave none to generate the code of the whole step."""
        now = time.monotonic()
        self.was_cut_off |= (now > self.proposals.deadline
                             or now + self._try_seconds + self.account.whole_seconds > self._latest)
        return self.was_cut_off

    def default(self) -> _Candidate:
        """What Inductor does by itself."""
        return self.judge(self.proposals.default)

    @cached_property
    def default_cost(self) -> float:
        """What that costs."""
        return self.proposals.cost(self.proposals.default)

    def judge(self, schedule: Schedule, strict_order: bool = False, is_last: bool = False
              ) -> _Candidate:
        """Compile a step with this schedule and follow its memory: the whole step at once where it
        is taken to be the last that is tried."""
        recipe = self.recipe(schedule, strict_order)
        if self.effort.progress is not None:
            self.effort.progress("generating the compiled step")
        step = (self.account.trace(recipe) if is_last and self._has_time_for_whole(recipe)
                else self.account.estimate(recipe))
        now = time.monotonic()
        self._try_seconds = max(self._try_seconds, now - self._try_ended)
        self._try_ended = now
        if schedule != self.proposals.default:
            self.overstated_bytes = max(
                self.overstated_bytes, self.form.net_peak_bytes(schedule) - step.peak_bytes)
        return _Candidate(schedule, recipe, step, self.proposals.cost(schedule))

    def _foreseen(self, schedule: Schedule, strict_order: bool, off_bytes: int) -> _Candidate:
        """A candidate as the problem accounts for it, and `off_bytes` beside that: for a search
        that is out of time."""
        from graph_capture.inductor.compiled_step import CompiledStep

        timeline = unroll(self.form.problem, schedule)
        course = memory_over(self.form.graph, timeline)
        course[BufferKind.TEMPORARY] = [
            size + max(0, off_bytes) for size in course[BufferKind.TEMPORARY]]
        at_peak = {kind: row[timeline.peak_position] for kind, row in course.items()}
        begins = next(position for position, index in timeline.runs
                      if self.form.graph.ops[index].phase is Phase.BACKWARD)
        step = CompiledStep(sum(at_peak.values()), at_peak, course, begins)
        return _Candidate(schedule, self.recipe(schedule, strict_order), step,
                          self.proposals.cost(schedule))

    def recipe(self, schedule: Schedule, strict_order: bool) -> Recipe:
        recipe = build_recipe(self.prepared, self.form, unroll(self.form.problem, schedule))
        return replace(recipe, backend="inductor", strict_order=strict_order, regions=tuple(
            replace(region, inplace_reuses=()) for region in recipe.regions))

    def within(self, net_bytes: int) -> _Candidate | None:
        """The cheapest candidate found whose compiled step takes at most `net_bytes`, where that of
        what Inductor does by itself takes more."""
        target_bytes = net_bytes
        for _ in range(_CONFIRMATIONS):
            found = self._judged_within(target_bytes)
            if found is None:
                return None
            whole = self.confirmed(found)
            if whole.step.peak_bytes <= net_bytes:
                return whole
            target_bytes -= whole.step.peak_bytes - net_bytes + int(_MARGIN * net_bytes)
            self._beside[found.recipe.strict_order] = (
                whole.step.peak_bytes - self.form.net_peak_bytes(found.schedule))
        return None

    def confirmed(self, found: _Candidate) -> _Candidate:
        """A candidate with the account of the whole step, whatever the time: a plan's peak is never
        that of a part."""
        if self.effort.progress is not None:
            self.effort.progress("generating the whole compiled step")
        return replace(found, step=self.account.trace(found.recipe))

    def _has_time_for_whole(self, recipe: Recipe) -> bool:
        """Whether the time limit leaves time to generate the code of the whole step."""
        return self.account.is_known(recipe) or (
            time.monotonic() + self.account.whole_seconds <= self._latest)

    def _judged_within(self, net_bytes: int) -> _Candidate | None:
        """The same, as layers that are alike are accounted for together."""
        found = None if self.form.low_peak else self._narrow(net_bytes, strict_order=False)
        price = _STRICTNESS * self.form.problem.keep_all_cost
        # It is worth a try where it may gain as much as it takes.
        if found is None or (not self.is_late() and (
                found.cost > self.proposals.cost_within(net_bytes) + 2 * price)):
            strict = self._narrow(net_bytes, strict_order=True)
            if strict is not None and (found is None or strict.cost + price < found.cost):
                found = strict
        for improve in (self._filled, self._simplified):
            if found is not None and not self.is_late():
                found = improve(found, net_bytes)
        return found

    def _filled(self, found: _Candidate, net_bytes: int) -> _Candidate:
        """A candidate that puts what is left of the budget to use: it saves in addition what
        Inductor would save by itself, the smallest first."""
        left = net_bytes - int(_MARGIN * net_bytes) - found.step.peak_bytes
        limit = self.form.net_peak_bytes(found.schedule) + left
        saved = saved_buffers(self.form, found.schedule)
        missing = sorted(self.proposals.costly - saved, key=lambda buffer: (
            self.form.graph.buffers[buffer].size_bytes, buffer))

        def saving_more(count: int) -> Schedule:
            return schedule_saving(self.form, saved.union(missing[:count]))

        count = bisect(range(1, len(missing) + 1), limit, key=lambda count: (
            self.form.net_peak_bytes(saving_more(count))))
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
        schedule = unify_blocks(
            self.form, found.schedule,
            net_peak_bytes=self.form.net_peak_bytes(found.schedule) + left,
            cost=self.form.cost(found.schedule) + _SIMPLICITY * self.form.problem.keep_all_cost)
        simpler = self.judge(schedule, found.recipe.strict_order)
        return simpler if simpler.step.peak_bytes <= net_bytes else found

    def _narrow(self, net_bytes: int, strict_order: bool) -> _Candidate | None:
        """The cheapest candidate found with one order of kernels."""
        internal = net_bytes
        low, high = 0, self.form.net_peak_bytes(self.proposals.default)
        # Budgets of the solver: `low` is known to fit or to be too small for it, `high` not to fit.
        best: _Candidate | None = None
        # What the code takes beside the problem's account.
        off_bytes = self._beside.get(strict_order) if self._beside and self.is_late() else None
        margin, rounds, foreseen = int(_MARGIN * net_bytes), 0, 0
        while rounds < _ROUNDS:
            if best is not None and self.is_late():
                break
            try:
                schedules = self.proposals.within(internal)
            except Refusal as refusal:
                low = max(low, internal)
                internal, rounds = refusal.minimum_bytes, rounds + 1
                if internal >= high:
                    break
                continue
            if off_bytes is not None and foreseen < _ROUNDS:
                left = net_bytes - off_bytes - min(map(self.form.net_peak_bytes, schedules))
                if left < 0 and internal + left - margin > low:
                    internal, foreseen = internal + left - margin, foreseen + 1
                    continue
                if left >= 0 and self.is_late():
                    return self._foreseen(min(schedules, key=self.form.net_peak_bytes),
                                          strict_order, off_bytes)
            rounds += 1
            candidate = self._best_of(
                schedules, net_bytes, strict_order, is_last=off_bytes is not None)
            off_bytes = candidate.step.peak_bytes - self.form.net_peak_bytes(candidate.schedule)
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
            internal += left - margin
            if not low < internal < high:
                internal = (low + high) // 2
        return best

    def _best_of(self, schedules: Sequence[Schedule], net_bytes: int, strict_order: bool,
                 is_last: bool = False) -> _Candidate:
        """The first that fits, else the smallest."""
        tried: list[_Candidate] = []
        for schedule in schedules:
            tried.append(self.judge(schedule, strict_order, is_last))
            if tried[-1].step.peak_bytes <= net_bytes:
                return tried[-1]
        return min(tried, key=lambda candidate: candidate.step.peak_bytes)

    def smallest(self, net_bytes: int = 0) -> tuple[_Candidate, int]:
        """A candidate whose compiled step takes at most `net_bytes`, or else the least memory among
        those tried; and the bytes that a later search will find a candidate for."""
        least_bytes, schedule = self.proposals.least
        try:
            cheap = self.proposals.within(least_bytes)
        except Refusal as refusal:
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
    searches = [_Search(prepared, form, effort) for form in prepared.forms]
    base, budget = searches[0], prepared.budget
    if budget_bytes is None:
        return _make_plan(searches, base, budget_bytes, base.confirmed(base.default()))
    net = budget.net_bytes(budget_bytes)
    if budget.is_possible(budget_bytes):
        if base.form.net_peak_bytes(base.proposals.default) <= _WORTH_GENERATING * net:
            default = base.default()
            if default.step.peak_bytes <= net:
                default = base.confirmed(default)
            if default.step.peak_bytes <= net:
                return _make_plan(searches, base, budget_bytes, default)
        # Copies of gradients are for budgets near the least.
        cheapest = choose(
            searches, lambda search: search.within(net), lambda search, best: (
                best.recipe.strict_order and search.proposals.cost_within(net) < best.cost))
        if cheapest is not None:
            return _make_plan(searches, cheapest[0], budget_bytes, cheapest[1])
    search, found, least = _smallest(searches, net)
    if budget.whole_bytes(found.step.peak_bytes) > budget_bytes:
        raise budget.refusal(budget_bytes, least, _describe(prepared, found.step))
    return _make_plan(searches, search, budget_bytes, found)


def smallest_plan(prepared: PreparedStep, effort: Effort) -> Plan:
    """The plan whose compiled step takes the least memory, among those tried."""
    searches = [_Search(prepared, form, effort) for form in prepared.forms]
    search, found, _ = _smallest(searches)
    return _make_plan(searches, search, None, found)


def _smallest(searches: Sequence[_Search], net_bytes: int = 0) -> tuple[_Search, _Candidate, int]:
    """As `_Search.smallest` over all forms that may take the least, by the problem's account; and
    the search that found the candidate."""
    least = min(search.proposals.least[0] for search in searches)
    tried: list[tuple[_Search, _Candidate, int]] = []
    for search in sorted(searches, key=lambda search: search.proposals.least[0]):
        if NO_LESS * search.proposals.least[0] <= least:
            tried.append((search, *search.smallest(net_bytes)))
            if tried[-1][1].step.peak_bytes <= net_bytes:
                break
    search, found, _ = min(tried, key=lambda one: one[1].step.peak_bytes)
    whole = search.confirmed(found)
    more_bytes = max(0, whole.step.peak_bytes - found.step.peak_bytes)
    return search, whole, more_bytes + min(bytes_needed for *_, bytes_needed in tried)


def _make_plan(searches: Sequence[_Search], search: _Search, budget_bytes: int | None,
               found: _Candidate) -> Plan:
    """The plan of a candidate that one of the searches, each among schedules of one form, found."""
    base, prepared, form = searches[0], search.prepared, search.form
    base_cost = base.form.problem.keep_all_cost
    # What an estimate takes for a gain, the machine may not.
    extra = max(0.0, (found.cost - base.default_cost) / base_cost) if base_cost else 0.0
    bound, is_proven = min(0.0, extra), False
    if extra > 0 and budget_bytes is not None and prepared.cost_model != "measured":
        least = _least_cost(searches, form.budget.net_bytes(budget_bytes))
        bound = min(max(0.0, (least - base.default_cost) / base_cost), extra)
        is_proven = found.cost <= least + PROOF_TOLERANCE * base_cost
    if prepared.cost_model == "measured":
        default_recipe = base.recipe(base.proposals.default, strict_order=False)
        if found.recipe != default_recipe:
            extra = search.account.seconds(found.recipe) / base.account.seconds(default_recipe) - 1
    return assemble_plan(
        prepared, form, budget_bytes, schedule=found.schedule,
        recipe=search.account.with_code(found.recipe),
        account=form.budget.account(found.step.peak_bytes, found.step.bytes_of),
        overhead=extra, overhead_bound=min(bound, extra),
        status="optimal" if is_proven else "feasible",
        solver=search.effort.solver, seconds=time.monotonic() - base.started,
        made=found.step.course, backward_begins=found.step.backward_begins,
        notes=("overhead is relative to the step that Inductor compiles without a budget",
               *((CUT_OFF,) if any(each.was_cut_off for each in searches) else ())))


def _least_cost(searches: Sequence[_Search], net_bytes: int) -> float:
    """A bound on the cost of any choice whose code takes at most `net_bytes`, whatever the form, if
    no code takes less beside the problem's account than that of the steps that were followed."""
    overstated = max(search.overstated_bytes for search in searches)
    return min(search.proposals.least_cost_within(net_bytes + overstated) for search in searches)


def _describe(prepared: PreparedStep, step: CompiledStep) -> str:
    """What holds the memory of the smallest step that was found."""
    memory = prepared.budget.with_resident(step.bytes_of)
    parts = ", ".join(f"{category} {format_bytes(size)}"
                      for category, size in memory.items() if size)
    return f"At that minimum the compiled step holds {parts}."
