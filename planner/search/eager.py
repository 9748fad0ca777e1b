"""Plan a step that runs op by op, whose memory the simulator computes exactly.

The limit is on the whole step; the solver gets the part that remains for forward and backward.
Resident memory and the optimizer's step, which no schedule changes, set a floor.
"""

from __future__ import annotations

from planner.errors import InfeasibleBudget
from planner.plans.decisions import build_spec
from planner.plans.making import TOLERATED_SHARE, assemble_plan
from planner.plans.plan import Plan
from planner.search.variants import Effort, cheapest, smallest, solve_variant
from planner.solvers.errors import InfeasibleBudget as Refusal
from planner.solvers.problem import Schedule
from planner.solvers.result import Result
from planner.solvers.simulator import unroll
from planner.step.breakdown import backward_begins, breakdown, describe_bottleneck, memory_over
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant

OFFLOAD_IS_EXPERIMENTAL = (
    "storing results on the host is experimental: no GPU has run it, and the extra time counts on "
    "the nominal rate of its link")
INTERRUPTED = "planning was interrupted: this is the best plan that was found until then"


def schedule_within(prepared: PreparedStep, budget_bytes: int | None, effort: Effort, *,
                    warm_start: Schedule | None = None) -> tuple[Variant, Result]:
    """The cheapest schedule found and its graph variant; raises `InfeasibleBudget`."""
    if budget_bytes is None:
        return _schedule_without_budget(prepared, effort)
    if not prepared.budget.is_possible(budget_bytes):
        raise infeasible(prepared, budget_bytes)
    variant, found = cheapest(
        prepared.variants, prepared.budget.net_bytes(budget_bytes), effort, warm_start)
    if isinstance(found, Refusal):
        raise _refusal(prepared, variant, budget_bytes, found.schedule)
    return variant, found


def _schedule_without_budget(prepared: PreparedStep, effort: Effort) -> tuple[Variant, Result]:
    """The schedule that recomputes nothing, unless the plain step uses less memory than that: then
    the cheapest schedule found within the peak of the plain step.

    A captured backward may read results of the forward that the plain step does not save.
    """
    keep_all = prepared.base, solve_variant(prepared.base, None, Effort(solver="none"))
    limit_bytes = prepared.baseline_peak_bytes
    if effort.solver == "none" or (
            prepared.keep_all_peak_bytes <= (1 + TOLERATED_SHARE) * limit_bytes):
        return keep_all
    try:
        return schedule_within(prepared, limit_bytes, effort)
    except InfeasibleBudget:
        return keep_all


def smallest_result(prepared: PreparedStep, effort: Effort) -> tuple[Variant, Result]:
    """A schedule within the smallest budget known to be feasible, and its graph variant.  If the
    optimizer's step uses more memory than any schedule needs, that is the budget."""
    variant, found = cheapest(prepared.variants, prepared.budget.least_net_bytes, effort)
    if isinstance(found, Refusal):
        return variant, solve_variant(variant, found.minimum_bytes, effort, found.schedule)
    return variant, found


def infeasible(prepared: PreparedStep, budget_bytes: int) -> InfeasibleBudget:
    """The error for an infeasible budget: the smallest feasible one, and the memory at that
    peak."""
    variant, schedule = smallest(prepared.variants, prepared.budget.least_net_bytes)
    return _refusal(prepared, variant, budget_bytes, schedule)


def _refusal(prepared: PreparedStep, variant: Variant, budget_bytes: int, schedule: Schedule
             ) -> InfeasibleBudget:
    return InfeasibleBudget(
        budget_bytes, variant.peak_bytes(schedule),
        describe_bottleneck(variant, unroll(variant.problem, schedule)),
        proven_minimum_bytes=prepared.proven_minimum_bytes)


def make_plan(prepared: PreparedStep, variant: Variant, budget_bytes: int | None, result: Result
              ) -> Plan:
    """The plan of a solver's result, with the memory breakdown of the whole step."""
    timeline = unroll(variant.problem, result.schedule)
    overhead = variant.overhead(result.schedule)
    return assemble_plan(
        prepared, variant, budget_bytes, schedule=result.schedule,
        spec=build_spec(prepared, variant, timeline), breakdown=breakdown(variant, timeline),
        overhead=overhead,
        # If proven, the two are equal; the bound's own rounding would make them differ.
        overhead_bound=overhead if result.status == "optimal" else (
            min(max(result.overhead_bound, 0.0), overhead)),
        status=result.status, solver=result.solver, seconds=result.seconds,
        reserved_bytes=prepared.reserved_bytes(variant, timeline),
        made=memory_over(variant.graph, timeline),
        backward_begins=backward_begins(variant.graph, timeline),
        notes=(*((INTERRUPTED,) if result.interrupted else ()),
               *(() if prepared.surroundings is None else prepared.surroundings.notes),
               *((OFFLOAD_IS_EXPERIMENTAL,) if timeline.offloaded else ())))
