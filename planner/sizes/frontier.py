"""The memory/overhead curve: extra time as a function of peak memory.

Budgets are spaced evenly from the smallest feasible one to the peak without recomputation.  They
are solved together (`solvers.curve`): schedules are reused for larger budgets and bounds for
smaller ones, so overhead never rises with the budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Unpack

from torch import nn

from planner.api import prepare_step
from planner.arguments.planning import PlanArguments, Planning, check_count, takes_planning
from planner.plans.plan import Plan
from planner.progress import Progress, watched
from planner.search.compiled import smallest_plan
from planner.search.eager import make_plan, schedule_within, smallest_result
from planner.search.planning import Effort, plan_within
from planner.search.variants import over_all_variants, solve_variant
from planner.solvers.curve import solve_all
from planner.solvers.errors import InfeasibleBudget
from planner.solvers.problem import Schedule
from planner.solvers.result import Result
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant

_TIME_FACTOR = 4.0
"""Time target of the whole curve, as a multiple of the time of one plan, capture included: less
than the promised five, since a solver may exceed its limit and the machine may slow down."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """Plans along the memory/overhead curve, cheapest first, none dominated by another."""

    plans: tuple[Plan, ...]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def to_dict(self) -> dict[str, Any]:
        """The curve as JSON values: figures of each point, not the plans themselves."""
        first = self.plans[0]
        return {
            "baseline_peak_bytes": first.baseline_peak_bytes,
            "resident_bytes": first.resident_bytes,
            "points": [
                {"budget_bytes": plan.budget_bytes, "peak_bytes": plan.peak_bytes,
                 "reserved_bytes": plan.reserved_bytes,
                 "overhead": plan.overhead, "overhead_bound": plan.overhead_bound,
                 "recompute_flops": plan.recompute_flops, "status": plan.status}
                for plan in self.plans],
        }

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the curve to a file whose extension names the format (`.png`, `.svg`, `.pdf`).

        Raises `ImportError` if matplotlib is missing, `OSError` if the path cannot be written.
        """
        from planner.reporters.figures import draw_frontier

        draw_frontier(self, path)

    def __str__(self) -> str:
        from planner.reporters.table import frontier_report, plain_text

        return plain_text(frontier_report(self.plans))


@takes_planning()
def frontier(model: nn.Module, inputs: object = None, *, points: int = 20,
             progress: Progress | None = None, **arguments: Unpack[PlanArguments]) -> Frontier:
    """Trace the memory/overhead curve of `model` with up to `points` plans.

    `time_limit` is that of one plan in seconds.  The plan in the middle of the curve uses it; the
    whole curve takes at most five times as long as that plan did, capture included in both (except
    for `points` searches of a twentieth of a second each).  The other arguments and errors are
    those of `planner.plan`.
    """
    if check_count("points", points, 0) < 2:
        raise ValueError(f"points must be at least 2 (both ends of the curve), got {points}")
    planning = Planning.of(frontier, arguments).without_offload("planner.frontier")
    started = time.monotonic()
    with watched(progress, f"tracing the frontier of {type(model).__name__}") as report:
        prepared = prepare_step(model, inputs, planning, report)
        return trace_frontier(prepared, points,
                              Effort(planning.solver, planning.time_limit, progress=report),
                              capture_seconds=time.monotonic() - started)


def trace_frontier(prepared: PreparedStep, points: int, effort: Effort, *,
                   capture_seconds: float = 0.0) -> Frontier:
    """The curve of a captured step.

    `effort` is that of one plan; `capture_seconds` is the time of the capture, which a curve needs
    once and every single plan again.
    """
    begin = time.monotonic()
    if prepared.base.compiled is not None:
        each = effort.time_limit * min(1.0, _TIME_FACTOR / points)
        return Frontier(_undominated(_compiled_plans(
            prepared, points, replace(effort, time_limit=each))))
    variant, smallest = smallest_result(
        prepared, replace(effort, time_limit=effort.time_limit / points))
    low, high = variant.peak_bytes(smallest.schedule), prepared.keep_all_peak_bytes
    budgets = [low + (high - low) * number // (points - 1) for number in range(points)]
    middle_variant, middle = schedule_within(prepared, budgets[points // 2], effort,
                                             warm_start=smallest.schedule)
    one_plan = capture_seconds + middle.seconds
    left = _TIME_FACTOR * one_plan - capture_seconds - (time.monotonic() - begin)
    share = max(0.0, left) / len(prepared.variants)
    curves = [_curve(one, budgets, effort, share,
                     start=smallest.schedule if one is variant else None,
                     known={budgets[points // 2]: middle} if one is middle_variant else {})
              for one in prepared.variants]
    plans = list(_cheapest_of_each(prepared, curves, budgets))
    return Frontier(_undominated(_by_reserved(plans) if prepared.budget_of == "reserved"
                                 else plans))


def _curve(variant: Variant, budgets: Sequence[int], effort: Effort, seconds: float, *,
           start: Schedule | None, known: Mapping[int, Result]) -> dict[int, Result]:
    """Results of one variant for those of the ascending `budgets` that are feasible; `start` is a
    schedule within the smallest of them."""
    net_bytes = variant.budget.net_bytes
    if start is None:
        try:
            start = solve_variant(variant, net_bytes(budgets[0]), replace(
                effort, time_limit=effort.time_limit / len(budgets))).schedule
        except InfeasibleBudget as refusal:
            budgets = [budget for budget in budgets if net_bytes(budget) >= refusal.minimum_bytes]
            start = refusal.schedule or None
    if not budgets:
        return {}
    results = solve_all(
        variant.problem, [net_bytes(budget) for budget in budgets], seconds=seconds,
        most_seconds=effort.time_limit, solver=effort.solver, start=start,
        progress=effort.progress,
        known={net_bytes(budget): result for budget, result in known.items()})
    return {budget: replace(result, keep_all_cost=variant.base_seconds)
            for budget, result in zip(budgets, results, strict=True)}


def _cheapest_of_each(prepared: PreparedStep, curves: Sequence[Mapping[int, Result]],
                      budgets: Sequence[int]) -> Iterator[Plan]:
    """The cheapest plan for each budget, over all variants."""
    for budget in budgets:
        known = {variant: curve[budget]
                 for variant, curve in zip(prepared.variants, curves, strict=True)
                 if budget in curve}
        if not known:
            continue
        net_bytes = prepared.budget.net_bytes(budget)
        # A variant without a known schedule has no bound, though a schedule may exist.
        bounds = [known[variant].lower_bound if variant in known else variant.base_seconds
                  for variant in prepared.variants
                  if variant in known or variant.may_fit(net_bytes)]
        variant, result = min(known.items(), key=lambda found: found[1].cost)
        yield make_plan(prepared, variant, budget, over_all_variants(result, bounds))


def _by_reserved(plans: Sequence[Plan]) -> list[Plan]:
    """The same schedules, each as the plan for a budget equal to its reserved memory."""
    found = []
    for plan in plans:
        budget_bytes = plan.reserved_bytes
        assert budget_bytes is not None, "such a step is not planned by what is reserved"
        # A proof for a larger budget of allocated memory holds for this one.
        bound = max((other.overhead_bound for other in plans
                     if (other.budget_bytes or 0) >= budget_bytes), default=0.0)
        bound = min(bound, plan.overhead)
        proven = plan.status == "optimal" and bound == plan.overhead
        found.append(replace(plan, budget_bytes=budget_bytes, overhead_bound=bound,
                             status="optimal" if proven else "feasible"))
    return found


def _compiled_plans(prepared: PreparedStep, points: int, effort: Effort) -> list[Plan]:
    """Plans of a step that Inductor compiles; each budget is planned separately."""
    default = plan_within(prepared, None, effort)
    smallest = smallest_plan(prepared, effort)
    low, high = smallest.peak_bytes, default.peak_bytes
    plans = [smallest, default]
    for number in range(1, points - 1):
        if effort.progress is not None:
            effort.progress(f"frontier: point {number + 1} of {points}")
        plans.append(plan_within(prepared, low + (high - low) * number // (points - 1), effort))
    return plans


def _undominated(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Plans that are not dominated in memory and time, cheapest first."""
    chosen: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.overhead, plan.limited_bytes,
                                                plan.budget_bytes or 0)):
        if not chosen or plan.limited_bytes < chosen[-1].limited_bytes:
            chosen.append(plan)
    return tuple(chosen)
