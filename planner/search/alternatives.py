"""What a budget that cannot be met would need if the plan were allowed more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.arguments.planning import CHOICES, Planning
from planner.errors import CaptureError, InfeasibleBudget
from planner.search.eager import infeasible
from planner.search.effort import Effort
from planner.step.prepared import PreparedStep


def with_alternatives(refusal: InfeasibleBudget, planning: Planning,
                      prepared_for: Callable[[Planning], PreparedStep], effort: Effort
                      ) -> InfeasibleBudget:
    """The refusal with the smallest budgets of plans that may do more than `planning` allows,
    where these are smaller; of what is reserved only planning itself can tell."""
    if planning.budget_of != "allocated":
        return refusal
    wider = replace(planning, allow=CHOICES) if planning.backend == "eager" else planning
    if set(wider.allow) == set(planning.allow):
        return refusal
    try:
        prepared = prepared_for(wider)
    except CaptureError:  # which planning itself did not meet
        return refusal
    if not any(form.pieces > 1 for form in prepared.forms):
        return refusal
    least = infeasible(prepared, refusal.budget_bytes, effort).minimum_bytes
    return refusal if least >= refusal.minimum_bytes else refusal.with_alternatives(
        {tuple(wider.allow): least})
