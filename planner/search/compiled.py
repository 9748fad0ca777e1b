"""Plan a step that Inductor compiles: Inductor's default, or the cheapest candidate from the
searches of its graph variants (`planner.search.compiled_search`).

The starting point is the recomputation that Inductor's own partitioner does without a budget: it
costs nothing beyond the memory traffic that it saves.

Blind spot: proofs (`planner.search.compiled_search`) hold under the problem's costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from planner.errors import InfeasibleBudget
from planner.plans.making import assemble_plan
from planner.plans.plan import Plan
from planner.search.compiled_search import Candidate, CompiledSearch
from planner.search.eager import OFFLOAD_IS_EXPERIMENTAL
from planner.search.variants import Effort, choose
from planner.solvers.incumbent import PROOF_TOLERANCE
from planner.step.prepared import PreparedStep
from planner.units import format_bytes

CUT_OFF = ("the time limit cut the search off, and this is the best that was found until then: a "
           "longer one, or a machine that does less beside, may find a better plan")
"""Note of such plans."""
_WORTH_GENERATING = 1.3
"""The default's code is not generated if the problem's breakdown is more than this multiple of the
budget."""
_NO_LESS = 0.95
"""Both variants of the least memory, by the problem's breakdown, are tried if they use nearly the
same."""


def plan_compiled(prepared: PreparedStep, budget_bytes: int | None, effort: Effort) -> Plan:
    """The cheapest plan found whose compiled step peaks within `budget_bytes`; raises
    `InfeasibleBudget`."""
    searches = _searches(prepared, effort)
    base, budget = searches[0], prepared.budget
    if budget_bytes is None:
        return _make_plan(searches, base, base.confirmed(base.default()))
    net = budget.net_bytes(budget_bytes)
    if budget.is_possible(budget_bytes):
        if base.variant.net_peak_bytes(base.default_schedule) <= _WORTH_GENERATING * net:
            default = base.default()
            if default.peak_bytes <= net:
                default = base.confirmed(default)
            if default.peak_bytes <= net:
                return _make_plan(searches, base, default, budget_bytes)
        cheapest = choose(searches, lambda search: search.within(net),
                          lambda search, best: search.is_worth(best))
        if cheapest is not None:
            return _make_plan(searches, *cheapest, budget_bytes)
    search, found = _smallest(searches, net)
    if budget.whole_bytes(found.peak_bytes) > budget_bytes:
        memory = ", ".join(f"{category} {format_bytes(size)}" for category, size
                           in budget.with_resident(found.step.by_category).items() if size)
        raise InfeasibleBudget(
            budget_bytes, budget.whole_bytes(found.peak_bytes),
            f"At that minimum the compiled step holds {memory}. It is the smallest of the compiled "
            "schedules that were tried within the time limit, and a longer one may find less."
            + ("" if search.generates_code else f" Note: {_without_code(search)}."))
    return _make_plan(searches, search, found, budget_bytes)


def smallest_plan(prepared: PreparedStep, effort: Effort) -> Plan:
    """The plan whose compiled step uses the least memory among those tried."""
    searches = _searches(prepared, effort)
    return _make_plan(searches, *_smallest(searches))


def _without_code(search: CompiledSearch) -> str:
    """Note of plans whose schedules are not judged by generated code."""
    why = ("the generated code of a step that stores results on the host is not traced"
           if search.breakdown.tracer is not None else
           f"Inductor generates no code for {search.variant.graph.device} on this machine")
    return (f"{why}: the peak is an upper bound, which assumes that kernels store results and keep "
            "the operands of those that they may compute again, with a margin of 3%. The code is "
            "not compared with it where the plan is applied: planner.verify measures the step "
            "there, and a plan made by its code may need less")


def _searches(prepared: PreparedStep, effort: Effort) -> list[CompiledSearch]:
    """One search for each variant; with a link to the host also for the variant without it, whose
    code may be followed."""
    alone = [replace(variant, problem=replace(variant.problem, link=None))
             for variant in prepared.variants if variant.problem.link is not None]
    return [CompiledSearch(prepared, variant, effort) for variant in (*alone, *prepared.variants)]


def _smallest(searches: Sequence[CompiledSearch], net_bytes: int = 0
              ) -> tuple[CompiledSearch, Candidate]:
    """Like `CompiledSearch.smallest`, over the two variants that may use the least memory by the
    problem's breakdown; also returns the search that found the candidate."""
    searches = sorted(searches, key=lambda search: search.least[0])[:2]
    tried: list[tuple[CompiledSearch, Candidate]] = []
    for search in searches:
        if not tried or (tried[0][1].peak_bytes > net_bytes
                         and _NO_LESS * search.least[0] <= searches[0].least[0]):
            tried.append((search, search.smallest(net_bytes)))
    search, found = min(tried, key=lambda one: one[1].peak_bytes)
    return search, search.confirmed(found)


def _make_plan(searches: Sequence[CompiledSearch], search: CompiledSearch, found: Candidate,
               budget_bytes: int | None = None) -> Plan:
    """The plan of the candidate that `search`, one of `searches`, found."""
    base, prepared, variant = searches[0], search.prepared, search.variant
    base_cost = base.variant.problem.keep_all_cost
    # An estimated gain may not materialize.
    extra = max(0.0, (found.cost - base.default_cost) / base_cost) if base_cost else 0.0
    bound, is_proven = min(0.0, extra), False
    if extra > 0 and budget_bytes is not None and prepared.cost_model != "measured":
        # Assumes that no code has a lower overhead than that of the traced steps.
        net_bytes = variant.budget.net_bytes(budget_bytes) + max(
            each.overstated_bytes for each in searches)
        least = min(each.least_cost_within(net_bytes) for each in searches)
        bound = min(max(0.0, (least - base.default_cost) / base_cost), extra)
        is_proven = found.cost <= least + PROOF_TOLERANCE * base_cost
    if (prepared.cost_model == "measured" and search.generates_code
            and found.spec != base.default_spec):
        extra = (search.breakdown.seconds(found.spec)
                 / base.breakdown.seconds(base.default_spec) - 1)
    return assemble_plan(
        prepared, variant, budget_bytes, schedule=found.schedule,
        spec=search.breakdown.with_code(found.spec),
        breakdown=variant.budget.breakdown(found.peak_bytes, found.step.by_category),
        overhead=extra, overhead_bound=min(bound, extra),
        status="optimal" if is_proven else "feasible",
        solver=search.effort.solver, seconds=time.monotonic() - base.started,
        made=found.step.memory_timeline, backward_begins=found.step.backward_begins,
        notes=("overhead is relative to the step that Inductor compiles without a budget",
               *(() if search.generates_code else
                 (_without_code(search),)),
               *((OFFLOAD_IS_EXPERIMENTAL,) if variant.offloaded_bytes(found.schedule) else ()),
               *((CUT_OFF,) if any(each.is_cut_off for each in searches) else ())))
