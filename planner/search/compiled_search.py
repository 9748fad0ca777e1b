"""Search one graph variant of a step for Inductor: the solver proposes, the generated code decides.

Model of the world: the scheduling problem counts ops, and Inductor generates kernels from them.
The memory of a schedule therefore differs between the problem and the compiled step, slightly.
Each schedule is evaluated by the code that Inductor generates for it
(`graph_capture.inductor.compiled_step`), and the solver's budget is adjusted until the compiled
step fills the user's budget as far as possible.  Code of the whole step is generated for the likely
plan; other tries use a step without most of its repeated layers.

Work is counted, not timed: the same step and budget give the same plan on a busy machine, unless
the time limit is reached; then the best plan so far is returned, with a note.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from planner._apply.rewrite_spec import RewriteSpec
from planner.search.candidate import Candidate, foreseen_step, peak_bytes_of, spec_for_inductor
from planner.search.codegen_overhead import MARGIN, CodegenOverhead, at_most
from planner.search.effort import Effort
from planner.search.proposals import Proposals
from planner.search.saving import saved_buffers, schedule_saving
from planner.search.time_left import TimeLeft
from planner.search.variants import without_workspace
from planner.solvers.errors import InfeasibleBudget as Refusal
from planner.solvers.problem import Schedule
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant

_ROUNDS = 4
"""Limit on the solver budgets tried for one plan and kernel order."""
_CLOSE_ENOUGH = 0.02
"""Fraction of the budget that may remain unused."""
_WORTH = 1e-3
"""Minimal gain, as a fraction of the step's time, for generating the code of another step."""
_STEEP = 0.05
"""Extra time, as a fraction of the step, above which the last of the budget may save much of it: 3%
of the step of a U-Net by 0.4% of the budget."""
_WORKSPACE = 0.05
"""Fraction of the budget above which the workspace of one op may decide whether a schedule fits."""
_SPREAD = 0.02
"""Relative difference between the smallest peaks of two searches, which stop by the clock."""
_STRICTNESS = 0.03
"""Cost of the fixed kernel order, as a fraction of the step's time (Llama at 60%)."""
_TIGHT, _MAYBE_TIGHT = 1.25, 1.6
"""Budgets below the first multiple of the least memory, by the problem's breakdown, are met in the
fixed kernel order if at all; the least is computed if a budget is below the second multiple of its
lower bound."""
_CONFIRMATIONS = 3
"""Limit on whole steps compiled for one variant because an estimate did not fit."""


class CompiledSearch:
    """The schedules tried for one graph variant of a step.

    A library's convolution may need much workspace for one operand layout and hardly any for
    another, and Inductor may choose other layouts under another schedule.  Such steps therefore
    also have a breakdown without workspace; schedules that it accepts are evaluated by their code.
    """

    def __init__(self, prepared: PreparedStep, variant: Variant, effort: Effort, *,
                 has_workspace: bool = True, started: float | None = None) -> None:
        """`has_workspace`: False if the solver's problem leaves out the workspace of ops.
        `started`: the start of the time limit; `None`: now."""
        assert variant.compiled is not None
        self.prepared, self.variant, self.effort = prepared, variant, effort
        self.breakdown, self.has_workspace = variant.compiled, has_workspace
        self.time = TimeLeft(effort.time_limit, self.breakdown, started)
        self.proposals = Proposals(variant if has_workspace else without_workspace(variant), effort,
                                   self.time)
        self.net_peak_bytes = self.proposals.variant.net_peak_bytes
        self._beside = CodegenOverhead(self.net_peak_bytes(self.proposals.default))
        self._is_hopeless = False
        """True if workspace that this breakdown leaves out exceeded the budget."""
        self.followed: list[Candidate] = []
        """Candidates whose code was traced, except Inductor's default, which peaks elsewhere."""

    def without_workspace(self) -> CompiledSearch:
        """A search of the same variant by a breakdown without workspace."""
        search = CompiledSearch(self.prepared, self.variant, self.effort, has_workspace=False,
                                started=self.time.started)
        search.followed, search._beside.default_code = self.followed, self._beside.default_code
        return search

    def depends_on_workspace(self, net_bytes: int) -> bool:
        """True if the workspace of some op may decide whether a schedule fits."""
        return any(op.workspace_bytes > _WORKSPACE * net_bytes for op in self.variant.problem.ops)

    def is_worth(self, net_bytes: int, best: Candidate) -> bool:
        """True if this search may find a cheaper candidate than `best`, of another search."""
        if self.variant.low_peak:  # copies of gradients are for budgets near the least
            return best.spec.kernel_order and self.proposals.cost_within(net_bytes) < best.cost
        worth = _WORTH * self.variant.problem.keep_all_cost
        return not self.is_late() and self._promised(net_bytes) < best.cost - worth

    def leaves_more_than(self, other: CompiledSearch, net_bytes: int, best: Candidate) -> bool:
        """True if the solver would have more memory here than `best` uses.  `other`: a search in
        which no schedule costs more: this one, or one without workspace."""
        return self._for_solver(net_bytes) > other.net_peak_bytes(best.schedule)

    def _for_solver(self, net_bytes: int) -> int:
        """The solver's budget for code that may use at most `net_bytes`."""
        return net_bytes - self._expected_codegen_overhead(net_bytes)[0]

    def _expected_codegen_overhead(
        self, net_bytes: int, kernel_order: bool = False
    ) -> tuple[int, int]:
        """Expected codegen overhead, and its tolerated error."""
        if not self.followed and self.is_late():  # the first try is the last one
            return at_most(net_bytes), net_bytes
        if kernel_order or self.variant.low_peak:  # near the least: either sign
            return 0, net_bytes
        is_unsure = self.has_workspace and self.depends_on_workspace(net_bytes)
        return self._beside.expected(net_bytes, is_unsure)

    def _promised(self, net_bytes: int) -> float:
        """Expected cost of a schedule whose code uses at most `net_bytes`."""
        return self.proposals.cost_within(self._for_solver(net_bytes))

    @property
    def overstated_bytes(self) -> int:
        """The largest amount by which the problem's breakdown exceeded the code's memory."""
        return -min(self._codegen_overheads(), default=0)

    def _codegen_overheads(self) -> list[int]:
        """Codegen overhead of each try."""
        return [found.peak_bytes - self.net_peak_bytes(found.schedule) for found in self.followed]

    def is_late(self) -> bool:
        """True if there is no time for another try, which is then skipped."""
        return self.time.is_late(self.proposals.solver_seconds)

    def default(self) -> Candidate:
        """Inductor's default."""
        found = self._evaluated(self.proposals.default, self.default_spec, as_whole=False)
        self._beside.default_code = found.peak_bytes
        return found

    @cached_property
    def default_cost(self) -> float:
        """Cost of Inductor's default."""
        return self.proposals.cost(self.proposals.default)

    def evaluate(self, schedule: Schedule, kernel_order: bool = False, as_whole: bool = False
              ) -> Candidate:
        """Compile a step with this schedule and trace its memory; `as_whole`: the whole step, if
        time allows."""
        found = self._evaluated(schedule, self.spec(schedule, kernel_order), as_whole)
        if schedule != self.proposals.default:
            self.followed.append(found)
        return found

    def _evaluated(self, schedule: Schedule, spec: RewriteSpec, as_whole: bool) -> Candidate:
        if self.effort.progress is not None:
            self.effort.progress("generating the compiled step")
        begun = time.monotonic()
        step = (self.breakdown.trace(spec) if as_whole and self._has_time_for_whole(spec)
                else self.breakdown.estimate(spec))
        self.time.code_seconds = max(self.time.code_seconds, time.monotonic() - begun)
        return Candidate(schedule, spec, step, self.proposals.cost(schedule))

    def spec(self, schedule: Schedule, kernel_order: bool) -> RewriteSpec:
        """The rewrite spec of a schedule for a budget."""
        return replace(spec_for_inductor(self.prepared, self.variant, schedule),
                       kernel_order=kernel_order, low_memory_codegen=True)

    @cached_property
    def default_spec(self) -> RewriteSpec:
        """The rewrite spec of Inductor's default."""
        return spec_for_inductor(self.prepared, self.variant, self.proposals.default)

    def within(self, net_bytes: int) -> Candidate | None:
        """The cheapest candidate found whose compiled step uses at most `net_bytes`, which
        Inductor's default exceeds."""
        target_bytes = net_bytes
        for _ in range(_CONFIRMATIONS):
            found = self._evaluated_within(target_bytes)
            if found is None:
                return None
            whole = self.confirmed(found)
            if whole.peak_bytes <= net_bytes:
                return whole
            target_bytes -= whole.peak_bytes - net_bytes + int(MARGIN * net_bytes)
            self._beside.of_whole[found.spec.kernel_order] = (
                whole.peak_bytes - self.net_peak_bytes(found.schedule))
        return None

    def confirmed(self, found: Candidate) -> Candidate:
        """The candidate with the memory breakdown of the whole step, regardless of time: a plan's
        peak is never estimated from a part."""
        if self.effort.progress is not None:
            self.effort.progress("generating the whole compiled step")
        return replace(found, step=self.breakdown.trace(found.spec))

    def _has_time_for_whole(self, spec: RewriteSpec) -> bool:
        """True if there is time to generate the code of the whole step."""
        return self.breakdown.is_known(spec) or self.time.allows_whole()

    def _evaluated_within(self, net_bytes: int) -> Candidate | None:
        """Like `within`, but estimates repeated layers from one copy."""
        is_tight = not self.variant.low_peak and self._is_tight(net_bytes)
        found = None if is_tight or self.variant.low_peak else self._narrow(net_bytes, False)
        if found is None and not is_tight and self._has_one_try_left():
            return self._last_try(net_bytes)
        price = _STRICTNESS * self.variant.problem.keep_all_cost
        # A try is worthwhile if it may gain as much as it costs.
        if not self._is_hopeless and (found is None or self._may_gain(2 * price, found, net_bytes)):
            strict = self._narrow(net_bytes, kernel_order=True)
            if strict is not None and (found is None or strict.cost + price < found.cost):
                found = strict
            if is_tight and strict is not None and self._may_gain(0.0, strict, net_bytes):
                loose = self._narrow(net_bytes, kernel_order=False)
                if loose is not None and loose.cost <= strict.cost + price:
                    found = loose
        if found is not None and found.cost > self.default_cost:
            found = self._filled(found, net_bytes)
        return found

    def _last_try(self, net_bytes: int) -> Candidate | None:
        """The solver's proposal for a budget that its code is very likely to meet, if it does.  A
        breakdown without workspace leaves this to the other one, whose code fits sooner."""
        if not self.has_workspace:
            return None
        off_bytes = at_most(net_bytes, self._codegen_overheads())
        try:
            schedules = self.proposals.within(net_bytes - off_bytes)
        except Refusal:
            return None
        found = self.evaluate(min(schedules, key=self.net_peak_bytes), as_whole=True)
        return found if found.peak_bytes <= net_bytes else None

    def _may_gain(self, seconds: float, found: Candidate, net_bytes: int) -> bool:
        """True if there is time for another kernel order, which may cost `seconds` less."""
        return (self.leaves_more_than(self, net_bytes, found)
                and found.cost > self._promised(net_bytes) + seconds
                and not self.is_late())

    def _is_tight(self, net_bytes: int) -> bool:
        """True if a budget is so close to the least that only the fixed kernel order may meet
        it."""
        return (net_bytes < _MAYBE_TIGHT * self.variant.floor_bytes
                and net_bytes < _TIGHT * self.proposals.least[0])

    def _filled(self, found: Candidate, net_bytes: int) -> Candidate:
        """A candidate that uses the rest of the budget to save more of what Inductor saves by
        default, the smallest buffers first."""
        left = net_bytes - int(MARGIN * net_bytes) - found.peak_bytes
        limit = self.net_peak_bytes(found.schedule) + left
        saved = saved_buffers(self.variant, found.schedule)
        missing = sorted(self.proposals.costly - saved, key=lambda buffer: (
            self.variant.graph.buffers[buffer].size_bytes, buffer))

        def saving_more(count: int) -> Schedule:
            return schedule_saving(self.variant, saved.union(missing[:count]))

        count = bisect(range(1, len(missing) + 1), limit, key=lambda count: (
            self.net_peak_bytes(saving_more(count))))
        schedule = saving_more(count)
        worth = _WORTH * self.variant.problem.keep_all_cost
        if (not count or self.proposals.cost(schedule) >= found.cost - worth or self.is_late()):
            return found
        fuller = self.evaluate(schedule, found.spec.kernel_order)
        return fuller if fuller.peak_bytes <= net_bytes else found

    def _narrow(self, net_bytes: int, kernel_order: bool) -> Candidate | None:
        """The cheapest candidate found with one kernel order."""
        # Solver budgets: `low` is known to fit or to be infeasible, `high` not to fit.
        low = self.proposals.least[0] - 1 if self._is_tight(net_bytes) else 0
        high = self.net_peak_bytes(self.proposals.default)
        best: Candidate | None = None
        codegen_overhead = self._beside.of_whole
        seen_bytes = (
            codegen_overhead.get(kernel_order) if codegen_overhead and self.is_late() else None
        )
        # Codegen overhead.
        off_bytes, spread = (seen_bytes, 0) if seen_bytes is not None else (
            self._expected_codegen_overhead(net_bytes, kernel_order))
        # The first try is likely to be the plan, if its kernel order is the cheapest.
        as_whole = seen_bytes is not None or not (kernel_order or self.variant.low_peak)
        internal = min(high, net_bytes - off_bytes)
        margin, rounds, foreseen = int(MARGIN * net_bytes), 0, 0
        while rounds < _ROUNDS:
            if self._has_one_try_left() or (best is not None and self.is_late()):
                break  # that one is `_last_try`, or the smallest
            try:
                schedules = self.proposals.within(internal)
            except Refusal as refusal:
                low = max(low, internal)
                internal, rounds = refusal.minimum_bytes, rounds + 1
                if internal >= high:
                    break
                continue
            left = net_bytes - off_bytes - min(map(self.net_peak_bytes, schedules))
            if left < -spread and foreseen < _ROUNDS and internal + left - margin > low:
                internal += left - (0 if spread else margin)
                foreseen += 1
                continue
            if left >= 0 and seen_bytes is not None and self.is_late():
                smallest = min(schedules, key=self.net_peak_bytes)
                return Candidate(smallest, self.spec(smallest, kernel_order),
                                 foreseen_step(self.variant, smallest, seen_bytes),
                                 self.proposals.cost(smallest))
            if not self.has_workspace and self.is_late():
                break  # the other breakdown gets the last try: it fits sooner
            rounds += 1
            candidate = self._best_of(schedules, net_bytes, kernel_order, as_whole)
            off_bytes = candidate.peak_bytes - self.net_peak_bytes(candidate.schedule)
            as_whole, spread, foreseen = True, 0, 0
            left = net_bytes - candidate.peak_bytes
            if left >= 0:
                if best is None or candidate.cost < best.cost:
                    best = candidate
                low = max(low, internal)
            else:
                high = min(high, internal)
            self._is_hopeless = left < -_WORKSPACE * net_bytes and not self.has_workspace
            if (self._is_hopeless or (best is not None and best.cost <= self.default_cost)
                    or high - low <= _CLOSE_ENOUGH * net_bytes):
                break
            # The next proposal is assumed to have the same overhead.
            internal += left - margin
            if 0 <= left <= _CLOSE_ENOUGH * net_bytes and not (
                    left > margin and self._is_dearer(candidate, internal)):
                break
            if not low < internal < high:
                internal = (low + high) // 2
        return best

    def _is_dearer(self, candidate: Candidate, internal_bytes: int) -> bool:
        """True if a candidate is clearly more expensive than the solver's proposal for a budget."""
        step = self.variant.problem.keep_all_cost
        return (candidate.cost > self.default_cost + _STEEP * step
                and self.proposals.gain_within(internal_bytes) > 4 * _WORTH * step
                and candidate.cost > self.proposals.cost_within(internal_bytes) + 4 * _WORTH * step)

    def _best_of(self, schedules: Sequence[Schedule], net_bytes: int, kernel_order: bool,
                 as_whole: bool = False) -> Candidate:
        """The first candidate that fits, else the smallest."""
        tried: list[Candidate] = []
        for schedule in schedules:
            tried.append(self.evaluate(schedule, kernel_order, as_whole))
            if tried[-1].peak_bytes <= net_bytes:
                return tried[-1]
        return min(tried, key=peak_bytes_of)

    def smallest(self, net_bytes: int = 0) -> tuple[Candidate, int]:
        """A candidate whose compiled step uses at most `net_bytes`, else the smallest of those
        tried; and the bytes within which a later search will find a candidate."""
        schedule = self.proposals.least[1]
        bare = (schedule,) if schedule else ()
        only_bare = bare and self._has_one_try_left()
        leanest = self._best_of(bare if only_bare else (*self._cheap_within_least(), *bare),
                                net_bytes, kernel_order=True)
        found = min((leanest, *self.followed), key=peak_bytes_of)
        if found.peak_bytes > net_bytes and not self._has_one_try_left():
            leanest = min((self.evaluate(schedule, strict)
                           for schedule in bare or (found.schedule,) for strict in (True, False)),
                          key=peak_bytes_of)
            found = min(found, leanest, key=peak_bytes_of)
            # The quality of the other candidates depends on the available time.
            leanest = leanest if self.time.is_over else found
        return found, int((1 + _SPREAD) * leanest.peak_bytes)

    def _cheap_within_least(self) -> tuple[Schedule, ...]:
        """The solver's proposals within the least memory, or slightly more."""
        least_bytes, schedule = self.proposals.least
        try:
            return self.proposals.within(least_bytes)
        except Refusal as refusal:
            if not (refusal.schedule or schedule):
                raise
            return (refusal.schedule,) if refusal.schedule else ()

    def _has_one_try_left(self) -> bool:
        """True if there is time for only one more try, since each may take as long as a whole
        step."""
        return bool(self.followed and not self.breakdown.leaves_out_layers and self.is_late())
