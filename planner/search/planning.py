"""From a captured step and a budget to a plan, whatever the backend.

A step is made ready once (`planner.step.prepared`) and then planned under as many budgets as
wanted.
"""

from __future__ import annotations

from planner.plans.plan import Plan
from planner.search.compiled import plan_compiled
from planner.search.eager import make_plan, schedule_within
from planner.search.effort import Effort
from planner.step.prepared import PreparedStep
from solvers.problem import Schedule

__all__ = ["Effort", "plan_within"]


def plan_within(prepared: PreparedStep, budget_bytes: int | None, effort: Effort | None = None, *,
                warm_start: Schedule | None = None) -> Plan:
    """The cheapest plan found whose whole step peaks within `budget_bytes`; raises
    `InfeasibleBudget`."""
    effort = effort or Effort()
    if prepared.base.compiled is not None:
        return plan_compiled(prepared, budget_bytes, effort)
    form, result = schedule_within(prepared, budget_bytes, effort, warm_start=warm_start)
    return make_plan(prepared, form, budget_bytes, result)
