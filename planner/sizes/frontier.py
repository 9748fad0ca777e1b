"""The memory/overhead curve: what each byte of memory less costs in time.

Budgets are spread evenly between the smallest that can be met and the peak without recomputation.
They are solved together (`solvers.curve`): schedules serve the larger budgets and bounds the
smaller ones, so overhead never rises with the budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from planner.api import capture, check_effort
from planner.plans.plan import Plan
from planner.progress import Progress, watched
from planner.search.compiled import smallest_plan
from planner.search.forms import may_fit, solve_variant
from planner.search.planning import (
    Effort,
    PreparedStep,
    make_plan,
    plan_within,
    schedule_within,
    smallest_result,
)
from solvers.curve import solve_all
from solvers.errors import InfeasibleBudget
from solvers.problem import Schedule
from solvers.result import Result

if TYPE_CHECKING:
    import torch
    from torch import nn

_TIME_FACTOR = 4.0
"""The whole curve aims at this many times the time of one plan, capture included: less than the
five promised, since a solver may overrun its limit and the machine may slow down meanwhile."""


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
                 "overhead": plan.overhead, "overhead_bound": plan.overhead_bound,
                 "recompute_flops": plan.recompute_flops, "status": plan.status}
                for plan in self.plans],
        }

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the curve to a file whose ending names the format (`.png`, `.svg`, `.pdf`).

        Raises `ImportError` where matplotlib is missing, `OSError` where the path cannot be
        written.
        """
        from planner.reporters.figures import draw_frontier

        draw_frontier(self, path)

    def __str__(self) -> str:
        from planner.reporters.table import frontier_report, plain_text

        return plain_text(frontier_report(self.plans))


def frontier(model: nn.Module, inputs: object = None, *, points: int = 20,
             loss_fn: Callable[[Any], torch.Tensor] | None = None, optimizer: object = None,
             solver: str = "auto", backend: str = "eager", cost_model: str = "roofline",
             device: torch.device | str | None = None, probe: bool = True,
             time_limit: float = 60.0, keep: Sequence[str] = (),
             regions: str | Sequence[str] = "model", progress: Progress | None = None) -> Frontier:
    """The curve of `model` in up to `points` plans.

    `time_limit` is that of one plan in seconds.  The plan in the middle of the curve is made with
    it; the whole curve takes at most five times as long as that plan did, capture included in both
    (but for `points` searches of a twentieth of a second each).  The other arguments, and the
    errors, are those of `planner.plan`.
    """
    if isinstance(points, bool) or not isinstance(points, int):
        raise TypeError(f"points must be a whole number, got {points!r}")
    if points < 2:
        raise ValueError(f"points must be at least 2 (both ends of the curve), got {points}")
    check_effort(solver, time_limit)
    started = time.monotonic()
    with watched(progress) as report:
        prepared = capture(model, inputs, loss_fn=loss_fn, optimizer=optimizer, backend=backend,
                           cost_model=cost_model, device=device, probe=probe, keep=keep,
                           regions=regions, progress=report)
        return trace_frontier(prepared, points,
                              Effort(solver=solver, time_limit=time_limit, progress=report),
                              capture_seconds=time.monotonic() - started)


def trace_frontier(prepared: PreparedStep, points: int, effort: Effort, *,
                   capture_seconds: float = 0.0) -> Frontier:
    """The curve of a captured step; `effort` is that of one plan, and `capture_seconds` what the
    capture took, which a curve needs once and every single plan anew."""
    begin = time.monotonic()
    if prepared.compiled is not None:
        each = effort.time_limit * min(1.0, _TIME_FACTOR / points)
        return Frontier(_undominated(_compiled_plans(
            prepared, points, replace(effort, time_limit=each))))
    _, step, smallest = smallest_result(
        prepared, replace(effort, time_limit=effort.time_limit / points))
    low = make_plan(step, None, smallest).peak_bytes
    high = prepared.keep_all_peak_bytes
    budgets = [low + (high - low) * number // (points - 1) for number in range(points)]
    middle_step, middle = schedule_within(prepared, budgets[points // 2], effort,
                                          warm_start=smallest.schedule)
    one_plan = capture_seconds + middle.seconds
    left = _TIME_FACTOR * one_plan - capture_seconds - (time.monotonic() - begin)
    plans: list[Plan] = []
    for variant in prepared.variants:
        share = max(0.0, left) / len(prepared.variants)
        plans += _curve(variant, budgets, effort, share,
                        start=smallest.schedule if variant is step else None,
                        known={budgets[points // 2]: middle} if variant is middle_step else {})
    return Frontier(_undominated(_cheapest_of_each(plans, prepared.variants)))


def _curve(step: PreparedStep, budgets: Sequence[int], effort: Effort, seconds: float, *,
           start: Schedule | None, known: Mapping[int, Result]) -> list[Plan]:
    """Plans of one variant for those of the ascending `budgets` that it can meet; `start` is a
    schedule within the smallest of them."""
    nets = [budget - step.resident_bytes for budget in budgets]
    if start is None:
        try:
            start = solve_variant(step, nets[0], replace(
                effort, time_limit=effort.time_limit / len(budgets))).schedule
        except InfeasibleBudget as refusal:
            nets = [net for net in nets if net >= refusal.minimum_bytes]
            start = refusal.schedule or None
    if not nets:
        return []
    results = solve_all(
        step.problem, nets, seconds=seconds, most_seconds=effort.time_limit, solver=effort.solver,
        seed=effort.seed, start=start, progress=effort.progress,
        known={budget - step.resident_bytes: result for budget, result in known.items()})
    keep_all_cost = step.plain_seconds
    return [make_plan(step, step.resident_bytes + net, replace(result, keep_all_cost=keep_all_cost))
            for net, result in zip(nets, results, strict=True)]


def _cheapest_of_each(plans: Sequence[Plan], variants: Sequence[PreparedStep]) -> list[Plan]:
    """Of the plans for each budget the cheapest; what is proven holds over all variants."""
    by_budget: dict[int, list[Plan]] = {}
    for plan in plans:
        assert plan.budget_bytes is not None
        by_budget.setdefault(plan.budget_bytes, []).append(plan)
    chosen = []
    for budget, rivals in by_budget.items():
        best = min(rivals, key=lambda plan: plan.overhead)
        possible = sum(may_fit(step, budget - step.resident_bytes) for step in variants)
        # Nothing is known of a variant for which no plan was found, though one may exist.
        bound = min(plan.overhead_bound for plan in rivals) if len(rivals) >= possible else 0.0
        chosen.append(best if bound >= best.overhead_bound else replace(
            best, overhead_bound=bound, status="feasible"))
    return chosen


def _compiled_plans(prepared: PreparedStep, points: int, effort: Effort) -> list[Plan]:
    """Plans of a step that Inductor compiles: each budget is met anew."""
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
    """Those that no other beats in memory or time without losing in the other, cheapest first."""
    chosen: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.overhead, plan.peak_bytes,
                                                plan.budget_bytes or 0)):
        if not chosen or plan.peak_bytes < chosen[-1].peak_bytes:
            chosen.append(plan)
    return tuple(chosen)
