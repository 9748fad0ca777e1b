"""Plan a captured step within a budget, for any backend.

A step is prepared once (`planner.step.prepared`) and then planned under any number of budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from planner._graph_capture.garbage import fewer_collections
from planner.arguments.budget import Budget
from planner.arguments.planning import CHOICES, Planning
from planner.errors import CaptureError, InfeasibleBudget
from planner.plans.plan import Plan
from planner.search.compiled import plan_compiled
from planner.search.eager import infeasible, make_plan, schedule_within
from planner.search.reserved import reserved_refusal, schedule_reserving
from planner.search.variants import Effort
from planner.solvers.minimum import minimum_peak
from planner.solvers.problem import Schedule
from planner.step.lowering import host_link
from planner.step.prepared import PreparedStep
from planner.units import format_bytes

__all__ = ["Effort", "leanest_plan", "plan_within", "refusal"]


@fewer_collections()
def plan_within(prepared: PreparedStep, budget_bytes: int | None, effort: Effort | None = None, *,
                warm_start: Schedule | None = None) -> Plan:
    """The cheapest plan found whose whole step stays within `budget_bytes`, allocated or reserved
    as `prepared.budget_of` says; raises `InfeasibleBudget`."""
    effort = effort or Effort()
    if prepared.base.compiled is not None:
        return plan_compiled(prepared, budget_bytes, effort)
    if prepared.budget_of == "reserved" and budget_bytes is not None:
        variant, result = schedule_reserving(prepared, budget_bytes, effort, warm_start=warm_start)
    else:
        variant, result = schedule_within(prepared, budget_bytes, effort, warm_start=warm_start)
    return make_plan(prepared, variant, budget_bytes, result)


def leanest_plan(prepared: PreparedStep, effort: Effort) -> Plan:
    """The plan for the smallest feasible budget."""
    try:
        return plan_within(prepared, max(prepared.resident_bytes, 1), effort)
    except InfeasibleBudget as refusal:
        return plan_within(prepared, refusal.minimum_bytes, effort)


def refusal(prepared: PreparedStep, budget_bytes: int, effort: Effort) -> InfeasibleBudget:
    """The error for a step that is known to have no plan within the budget."""
    if prepared.budget_of == "reserved":
        return reserved_refusal(prepared, budget_bytes, effort)
    return infeasible(prepared, budget_bytes)


_SHARE = 0.3
"""Part of the search for the smallest peak that an alternative is worth."""


def with_alternatives(refusal: InfeasibleBudget, planning: Planning, prepared: PreparedStep,
                      prepared_for: Callable[[Planning], PreparedStep]) -> InfeasibleBudget:
    """The refusal with budgets that plans with more choices than `planning` allows meet, where
    these are smaller.  It is unchanged for reserved memory, and where Inductor generates no code:
    the peaks of ops are no bounds there."""
    compiled = prepared.base.compiled
    if planning.budget_of != "allocated" or (compiled is not None and compiled.tracer is None):
        return refusal
    found: dict[tuple[str, ...], int] = {}
    for choice in CHOICES:
        if choice in planning.allow or (choice == "offload" and compiled is not None):
            continue
        try:
            wider = replace(planning, allow=(*planning.allow, choice))
            link = host_link(wider, prepared.base.graph.device)
            other = (prepared.with_link(link) if choice == "offload" and link is not None
                     else prepared_for(wider))
        except (CaptureError, ValueError):  # of the wider arguments only
            continue
        least = (infeasible(other, refusal.budget_bytes).minimum_bytes if choice == "offload"
                 else _least_in_chunks(other))
        if least is not None and least < refusal.minimum_bytes:
            found["recompute", *wider.allow] = least
    return refusal.with_alternatives(found) if found else refusal


def _least_in_chunks(prepared: PreparedStep) -> int | None:
    """A small budget that a variant in chunks meets; `None` if there is no such variant."""
    variant = min((variant for variant in prepared.variants if variant.chunks > 1),
                  key=lambda variant: variant.floor_bytes, default=None)
    return None if variant is None else variant.peak_bytes(minimum_peak(
        variant.problem, target_bytes=prepared.budget.least_net_bytes, share=_SHARE))


@contextmanager
def told_in_percent(limit: Budget | None, plain_bytes: int) -> Iterator[None]:
    """Word refusals as percentages if the budget is a fraction of the plain step's peak."""
    try:
        yield
    except InfeasibleBudget as refusal:
        if limit is None or limit.fraction is None:
            raise
        would_do = math.ceil(100 * refusal.minimum_bytes / plain_bytes)
        raise refusal.worded(
            f"{100 * float(limit.fraction):g}% is {format_bytes(refusal.budget_bytes)} of "
            f"{format_bytes(plain_bytes)}; {would_do}% would do "
            f"({format_bytes(would_do * plain_bytes // 100)}): {refusal}") from None
