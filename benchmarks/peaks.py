"""Predicted against measured peaks: every model at budgets down to the smallest possible.

    python -m benchmarks.peaks --model gpt2,llama --time-limit 30

Budgets are fractions of the memory above resident of the step without recomputation; the last is
the smallest feasible one.  Measured peaks are the allocator's, of the second step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from benchmarks.arguments import benchmark_parser, parse
from benchmarks.measure import MEGABYTE, peak_bytes, plan_or_smallest, thorough
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import Table
from planner.search.planning import plan_within

FRACTIONS = (0.8, 0.6, 0.4)


def run(workload: Workload, time_limit: float, table: Table) -> bool:
    """Print the rows of one model, in bytes above resident memory; return whether every measured
    peak is within its budget."""
    def show(budget: str, predicted: int, measured: int, *others: object) -> None:
        table.row(workload.name, budget, predicted / MEGABYTE, measured / MEGABYTE,
                  100 * (predicted / measured - 1), *others)

    measured = peak_bytes(workload, workload.model)
    started = time.perf_counter()
    prepared = workload.prepare()
    resident = prepared.resident_bytes
    show("plain", prepared.baseline_peak_bytes - resident, measured, None, None, None, "captured",
         time.perf_counter() - started)
    keep_all = prepared.keep_all_peak_bytes - resident
    budgets: list[tuple[str, int | None]] = [
        ("none", None), *((f"{part:.0%}", int(part * keep_all)) for part in FRACTIONS), ("min", 0)]
    ok = True
    for name, net_bytes in budgets:
        started = time.perf_counter()
        plan = plan_within(prepared, None) if net_bytes is None else (
            plan_or_smallest(thorough(prepared, time_limit), resident + net_bytes))
        seconds = time.perf_counter() - started
        if net_bytes is not None and plan.budget_bytes != resident + net_bytes:
            name = "min"
        measured = peak_bytes(workload, plan.apply(workload.model))
        over = plan.budget_bytes is not None and measured > plan.budget_bytes - resident
        ok = ok and not over
        show(name, plan.peak_bytes - resident, measured, "OVER" if over else "no",
             100 * plan.overhead, 100 * plan.overhead_bound, plan.status, seconds)
        if name == "min":
            break  # any smaller budget ends at the same plan
    return ok


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 if a peak exceeds its budget."""
    parser = benchmark_parser("peaks", __doc__, models=WORKLOADS, threads=2, time_limit=20.0)
    arguments = parse(parser, argv)
    table = Table("model:6", "budget:>6", "predicted MB:.3f", "measured MB:.3f", "off %:7.3f",
                  "over", "overhead %:.2f", "bound %:.2f", "status:8", "seconds:.1f")
    ok = [run(WORKLOADS[name](), arguments.time_limit, table) for name in arguments.model]
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
