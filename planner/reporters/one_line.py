"""A plan in one line, for logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.plans.plan import Plan


def summarize(plan: Plan) -> str:
    """Budget, peak, and extent of recomputation."""
    recomputed = sum(row.action == "recompute" for row in plan.decisions)
    limit = "no budget" if plan.budget_bytes is None else (
        f"budget {format_bytes(plan.budget_bytes)}")
    return (f"planned for {plan.backend}: {limit}, predicted peak "
            f"{format_bytes(plan.peak_bytes)} (as the model runs today "
            f"{format_bytes(plan.baseline_peak_bytes)}), {recomputed} of {len(plan.decisions)} ops "
            f"recomputed, estimated extra time {plan.overhead:.1%}")
