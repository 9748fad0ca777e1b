"""Build a plan from a schedule and its memory breakdown.

Eager and Inductor differ in how a schedule is evaluated (by the simulator, or from generated code),
not in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from planner._apply.rewrite_spec import RewriteSpec
from planner._graph_capture.training_graph import Category
from planner.plans.decisions import decide, with_step
from planner.plans.document import pick
from planner.plans.plan import Plan
from planner.solvers.problem import Schedule
from planner.solvers.result import Status
from planner.step.budget import StepBreakdown
from planner.step.categories import StepTimeline
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant
from planner.units import format_bytes

TOLERATED_SHARE = 0.001
"""Without a budget a plan may use this share more memory than the plain step, without a word."""


def assemble_plan(prepared: PreparedStep, variant: Variant, budget_bytes: int | None, *,
                  schedule: Schedule, spec: RewriteSpec, breakdown: StepBreakdown, overhead: float,
                  overhead_bound: float, status: Status, solver: str, seconds: float,
                  made: Mapping[Category, Sequence[int]], backward_begins: int,
                  notes: tuple[str, ...] = (), reserved_bytes: int | None = None) -> Plan:
    """The plan of a schedule of one graph variant, for a limit on the whole step.

    `breakdown`: the evaluation of the schedule; `spec`: the rewrite that runs it; `notes`: added to
    those of the capture.  `made`: bytes of forward and backward by kind, at each position.
    `reserved_bytes`: memory that torch reserves for the schedule, if known.
    """
    decisions = decide(variant, schedule)
    graph, budget = variant.graph, variant.budget
    more = _more_than_plain(prepared, breakdown.peak_bytes if budget_bytes is None else 0)
    return pick(
        Plan, breakdown, prepared, graph, budget, budget_bytes=budget_bytes,
        reserved_bytes=reserved_bytes, resident_bytes=budget.resident_bytes,
        optimizer_step_peak_bytes=budget.optimizer_step_bytes,
        recompute_flops=sum(row.flops * row.recomputations for row in decisions),
        offloaded_bytes=variant.offloaded_bytes(schedule),
        transfer_seconds=variant.transfer_seconds(schedule), overhead=overhead,
        overhead_bound=overhead_bound, status=status, solver=solver, decisions=decisions,
        spec=with_step(spec, graph), link=variant.problem.link,
        notes=(*graph.notes, *notes, *more), created_with=created_with(),
        memory_timeline=StepTimeline.of(made, backward_begins, budget.resident, prepared.plain),
        solve_seconds=seconds)


def _more_than_plain(prepared: PreparedStep, peak_bytes: int) -> tuple[str, ...]:
    plain_bytes = prepared.baseline_peak_bytes
    if peak_bytes <= (1 + TOLERATED_SHARE) * plain_bytes:
        return ()
    return (f"without a budget this plan uses {format_bytes(peak_bytes)}, more than the "
            f"{format_bytes(plain_bytes)} of the plain step: the captured step keeps results that "
            "the plain one does not",)


def created_with() -> tuple[tuple[str, str], ...]:
    """Versions by distribution; `unknown` for one that runs from its source tree."""
    found = {}
    for distribution in ("checkpoint-planner", "torch"):
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            found[distribution] = "unknown"
    return tuple(found.items())
