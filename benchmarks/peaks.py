"""Predicted against measured peaks: every model at budgets down to the smallest possible.

    python -m benchmarks.peaks --model gpt2,llama --time-limit 30

Budgets are fractions of the memory, above what is resident, of the step in which nothing is
recomputed; the last is the smallest that the planner meets.  Measured peaks are the allocator's, of
the second step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.arguments import benchmark_parser, parse
from benchmarks.measure import MEGABYTE, peak_bytes
from benchmarks.models import WORKLOADS, Workload
from planner.api import capture
from planner.errors import InfeasibleBudget
from planner.plans.plan import Plan
from planner.search.planning import Effort, plan_within
from planner.step.prepared import PreparedStep

FRACTIONS = (0.8, 0.6, 0.4)


@dataclass(frozen=True, slots=True)
class Row:
    """A plan and what it measured; bytes are above resident memory."""

    budget: str
    budget_bytes: int | None
    predicted_bytes: int
    measured_bytes: int
    plan: Plan
    planning_seconds: float

    @property
    def is_over(self) -> bool:
        """Whether the measured peak exceeds the budget."""
        return self.budget_bytes is not None and self.measured_bytes > self.budget_bytes


HEADER = (f"| {'model':<6} | {'budget':>6} | {'predicted MB':>12} | {'measured MB':>11} | "
          f"{'off %':>7} | {'over':<4} | {'overhead %':>10} | {'bound %':>7} | {'status':<8} | "
          f"{'seconds':>7} |\n"
          f"|{'-' * 8}|{'-' * 7}:|{'-' * 13}:|{'-' * 12}:|{'-' * 8}:|{'-' * 6}|{'-' * 11}:|"
          f"{'-' * 8}:|{'-' * 10}|{'-' * 8}:|")


def line(workload: Workload, row: Row) -> str:
    """A row of the table."""
    return (f"| {workload.name:<6} | {row.budget:>6} | {row.predicted_bytes / MEGABYTE:>12.3f} | "
            f"{row.measured_bytes / MEGABYTE:>11.3f} | "
            f"{_off(row.predicted_bytes, row.measured_bytes):>7.3f} | "
            f"{'OVER' if row.is_over else 'no':<4} | {100 * row.plan.overhead:>10.2f} | "
            f"{100 * row.plan.overhead_bound:>7.2f} | {row.plan.status:<8} | "
            f"{row.planning_seconds:>7.1f} |")


def _off(predicted: int, measured: int) -> float:
    return 100 * (predicted / measured - 1)


def measure(workload: Workload, prepared: PreparedStep, name: str, net_budget: int | None,
            time_limit: float) -> Row:
    """Plan within `net_budget` above resident memory, or, where that is impossible, at the
    minimum; apply and measure."""
    effort = Effort(time_limit=time_limit)
    resident = prepared.resident_bytes
    started = time.perf_counter()
    try:
        plan = plan_within(prepared, None if net_budget is None else resident + net_budget, effort)
    except InfeasibleBudget as refusal:
        name, net_budget = "min", refusal.minimum_bytes - resident
        plan = plan_within(prepared, refusal.minimum_bytes, effort)
    seconds = time.perf_counter() - started
    return Row(name, net_budget, plan.peak_bytes - resident,
               peak_bytes(workload, plan.apply(workload.model)), plan, seconds)


def run(workload: Workload, time_limit: float) -> bool:
    """Print the rows of one model; whether no measured peak exceeds its budget."""
    measured_plain = peak_bytes(workload, workload.model)
    started = time.perf_counter()
    prepared = capture(workload.model, workload.inputs, loss_fn=workload.loss_fn)
    seconds = time.perf_counter() - started
    predicted_plain = prepared.baseline_peak_bytes - prepared.resident_bytes
    keep_all = prepared.keep_all_peak_bytes - prepared.resident_bytes
    print(f"| {workload.name:<6} | {'plain':>6} | {predicted_plain / MEGABYTE:>12.3f} | "
          f"{measured_plain / MEGABYTE:>11.3f} | {_off(predicted_plain, measured_plain):>7.3f} | "
          f"{'':<4} | {'':>10} | {'':>7} | {'captured':<8} | {seconds:>7.1f} |", flush=True)
    budgets: list[tuple[str, int | None]] = [
        ("none", None), *((f"{part:.0%}", int(part * keep_all)) for part in FRACTIONS), ("min", 0)]
    ok = True
    for name, net_budget in budgets:
        row = measure(workload, prepared, name, net_budget, time_limit)
        ok = ok and not row.is_over
        print(line(workload, row), flush=True)
        if row.budget == "min":
            break  # any smaller budget ends at the same plan
    return ok


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where a peak exceeds its budget."""
    parser = benchmark_parser("peaks", __doc__, models=WORKLOADS, threads=2, time_limit=20.0)
    arguments = parse(parser, argv)
    print(HEADER, flush=True)
    ok = [run(WORKLOADS[name](), arguments.time_limit) for name in arguments.model]
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
