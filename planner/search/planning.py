"""Plan a captured step within a budget, for any backend.

A step is prepared once (`planner.step.prepared`) and then planned under any number of budgets.
"""

from __future__ import annotations

from planner._graph_capture.garbage import fewer_collections
from planner.errors import InfeasibleBudget
from planner.plans.plan import Plan
from planner.search.compiled import plan_compiled
from planner.search.eager import infeasible, make_plan, schedule_within
from planner.search.effort import Effort
from planner.search.reserved import reserved_refusal, schedule_reserving
from planner.solvers.problem import Schedule
from planner.step.prepared import PreparedStep

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
