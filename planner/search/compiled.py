"""Plan a step that Inductor compiles: Inductor's default, or the cheapest candidate from the
searches of its graph variants (`planner.search.compiled_search`).

The starting point is the recomputation that Inductor's own partitioner does without a budget: it
costs nothing beyond the memory traffic that it saves.

Blind spot: proofs (`planner.search.fused_bound`) hold under the problem's costs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.errors import InfeasibleBudget
from planner.plans.making import assemble_plan
from planner.plans.plan import Plan
from planner.search.candidate import Candidate
from planner.search.compiled_search import CompiledSearch
from planner.search.effort import Effort
from planner.search.proposals import NO_LESS
from planner.search.variants import choose
from planner.solvers.incumbent import PROOF_TOLERANCE
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner._graph_capture.inductor.compiled_step import CompiledStep

_WORTH_GENERATING = 1.3
"""The default's code is not generated if the problem's breakdown exceeds this multiple of the
budget; the breakdown has been 10% above the code there (ConvNeXt)."""
CUT_OFF = ("the time limit cut the search off, and this is the best that was found until then: a "
           "longer one, or a machine that does less beside, may find a better plan")
"""Note of such plans."""


def plan_compiled(prepared: PreparedStep, budget_bytes: int | None, effort: Effort) -> Plan:
    """The cheapest plan found whose compiled step peaks within `budget_bytes`; raises
    `InfeasibleBudget`."""
    searches = [CompiledSearch(prepared, variant, effort) for variant in prepared.variants]
    base, budget = searches[0], prepared.budget
    if budget_bytes is None:
        return _make_plan(searches, base, budget_bytes, base.confirmed(base.default()))
    net = budget.net_bytes(budget_bytes)
    if budget.is_possible(budget_bytes):
        if base.variant.net_peak_bytes(base.proposals.default) <= _WORTH_GENERATING * net:
            default = base.default()
            if default.step.peak_bytes <= net:
                default = base.confirmed(default)
            if default.step.peak_bytes <= net:
                return _make_plan(searches, base, budget_bytes, default)
        # The breakdown without workspace accepts more schedules, so it is tried first.
        lean = [base.without_workspace()] if base.depends_on_workspace(net) else []
        # Without time for another variant, the smallest step is tried.
        cheapest = choose((*lean, *searches), lambda search: (
            None if search is not base and base.is_late() else search.within(net)
        ), lambda search, best: (
            (search is not base or all(search.leaves_more_than(each, net, best)
                                       and each.is_worth(net, best) for each in lean))
            and search.is_worth(net, best)))
        searches += lean
        if cheapest is not None:
            return _make_plan(searches, cheapest[0], budget_bytes, cheapest[1])
    search, found, least = _smallest(
        [search for search in searches if search.has_workspace], net)
    if budget.whole_bytes(found.step.peak_bytes) > budget_bytes:
        raise InfeasibleBudget(budget_bytes, budget.whole_bytes(least),
                               _describe(prepared, found.step))
    return _make_plan(searches, search, budget_bytes, found)


def smallest_plan(prepared: PreparedStep, effort: Effort) -> Plan:
    """The plan whose compiled step uses the least memory among those tried."""
    searches = [CompiledSearch(prepared, variant, effort) for variant in prepared.variants]
    search, found, _ = _smallest(searches)
    return _make_plan(searches, search, None, found)


def _smallest(searches: Sequence[CompiledSearch], net_bytes: int = 0
              ) -> tuple[CompiledSearch, Candidate, int]:
    """Like `CompiledSearch.smallest`, over all variants that may use the least memory by the
    problem's breakdown; also returns the search that found the candidate."""
    least = min(search.proposals.least[0] for search in searches)
    tried: list[tuple[CompiledSearch, Candidate, int]] = []
    for search in sorted(searches, key=lambda search: search.proposals.least[0]):
        if NO_LESS * search.proposals.least[0] <= least:
            tried.append((search, *search.smallest(net_bytes)))
            if tried[-1][1].step.peak_bytes <= net_bytes:
                break
    search, found, _ = min(tried, key=lambda one: one[1].step.peak_bytes)
    whole = search.confirmed(found)
    more_bytes = max(0, whole.step.peak_bytes - found.step.peak_bytes)
    return search, whole, more_bytes + min(bytes_needed for *_, bytes_needed in tried)


def _make_plan(searches: Sequence[CompiledSearch], search: CompiledSearch, budget_bytes: int | None,
               found: Candidate) -> Plan:
    """The plan of the candidate that `search`, one of `searches`, found."""
    base, prepared, variant = searches[0], search.prepared, search.variant
    base_cost = base.variant.problem.keep_all_cost
    # An estimated gain may not materialize.
    extra = max(0.0, (found.cost - base.default_cost) / base_cost) if base_cost else 0.0
    bound, is_proven = min(0.0, extra), False
    if extra > 0 and budget_bytes is not None and prepared.cost_model != "measured":
        least = _least_cost(searches, variant.budget.net_bytes(budget_bytes))
        bound = min(max(0.0, (least - base.default_cost) / base_cost), extra)
        is_proven = found.cost <= least + PROOF_TOLERANCE * base_cost
    if prepared.cost_model == "measured" and found.spec != base.default_spec:
        extra = (search.breakdown.seconds(found.spec)
                 / base.breakdown.seconds(base.default_spec) - 1)
    return assemble_plan(
        prepared, variant, budget_bytes, schedule=found.schedule,
        spec=search.breakdown.with_code(found.spec),
        breakdown=variant.budget.breakdown(found.step.peak_bytes, found.step.bytes_of),
        overhead=extra, overhead_bound=min(bound, extra),
        status="optimal" if is_proven else "feasible",
        solver=search.effort.solver, seconds=time.monotonic() - base.time.started,
        made=found.step.memory_timeline, backward_begins=found.step.backward_begins,
        notes=("overhead is relative to the step that Inductor compiles without a budget",
               *((CUT_OFF,) if any(each.time.is_over for each in searches) else ())))


def _least_cost(searches: Sequence[CompiledSearch], net_bytes: int) -> float:
    """Lower bound on the cost of any choice whose code uses at most `net_bytes`, in any variant, if
    no code has a lower overhead than that of the traced steps."""
    least: dict[Variant, float] = {}
    overstated = math.inf
    for has_workspace in (True, False):  # both breakdowns of a variant give a bound
        by_breakdown = [search for search in searches if search.has_workspace is has_workspace]
        more_bytes = max([0, *(search.overstated_bytes for search in by_breakdown)])
        if more_bytes >= overstated:  # schedules that fit by the first one fit by this one
            continue
        overstated = more_bytes
        for search in by_breakdown:
            found = search.proposals.least_cost_within(net_bytes + more_bytes)
            least[search.variant] = max(found, least.get(search.variant, found))
    return min(least.values())


def _describe(prepared: PreparedStep, step: CompiledStep) -> str:
    """Memory of the smallest step found, by category."""
    memory = prepared.budget.with_resident(step.bytes_of)
    parts = ", ".join(f"{category} {format_bytes(size)}"
                      for category, size in memory.items() if size)
    return (f"At that minimum the compiled step holds {parts}. It is the smallest of the compiled "
            "schedules that were tried within the time limit, and a longer one may find less.")
