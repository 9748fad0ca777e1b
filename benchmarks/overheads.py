"""Extra time of a plan, predicted and measured, under each model of an op's cost.

    python -m benchmarks.overheads --model gpt2,bert,vit,unet --budgets 80,60,45 --rounds 9
    python -m benchmarks.overheads --backend inductor --budgets 80,60,40

Budgets are percentages of the peak of the step under the plan without a budget, for Inductor of its
part above resident memory; where one cannot be met, it is the smallest that can.  A plan's measured
overhead is the median, over rounds in which all plans of a model run in turns, of its step time
over that of the plan without a budget, less one, in seconds of CPU.  The plan is made with
`cost_model="measured"`; "by the table" prices the same schedule with `cost_model="roofline"` (not
for Inductor, where what is timed is the generated kernels).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.arguments import add_numbers, benchmark_parser, parse
from benchmarks.measure import plan_or_smallest, time_steps
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import Table
from planner.arguments.planning import BACKENDS
from planner.plans.decisions import schedule_of
from planner.search.planning import plan_within

PRICES = ("measured", "roofline")


def compare(workload: Workload, backend: str, budgets: Sequence[float], rounds: int,
            time_limit: float, table: Table) -> None:
    """Measure one model's plans and print their lines."""
    prices = PRICES if backend == "eager" else PRICES[:1]
    steps = {name: workload.prepare(backend=backend, cost_model=name) for name in prices}
    prepared = steps["measured"]
    keep_all = plan_within(prepared, None)
    below = 0 if backend == "eager" else prepared.resident_bytes
    share = (keep_all.peak_bytes - below) / 100
    plans = [plan_or_smallest(prepared, below + int(share * percent), time_limit)
             for percent in budgets]
    models = [plan.apply(workload.model) for plan in (keep_all, *plans)]
    times = time_steps(workload, models, rounds, clock=time.process_time)
    for index, plan in enumerate(plans, start=1):
        predicted = [100 * plan.overhead]
        if backend == "eager":
            forms = [steps[name].form_of(plan.recipe) for name in prices]
            schedule = schedule_of(forms[0], plan.recipe)
            predicted = [100 * form.overhead(schedule) for form in forms]
        ratio = times.ratio(index, 0)
        found = 100 * (ratio.median - 1)
        table.row(workload.name, f"{(plan.budget_bytes - below) / share:.0f}%",
                  f"{found:6.1f} [{100 * (ratio.low - 1):5.1f} {100 * (ratio.high - 1):5.1f}]",
                  *(number for value in predicted for number in (value, value - found)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = benchmark_parser("overheads", __doc__, models=("gpt2", "bert", "vit", "unet"),
                              rounds=9, threads=1, time_limit=10.0)
    add_numbers(parser, "--budgets", (80, 60, 45), "percentages")
    parser.add_argument("--backend", choices=BACKENDS, default="eager")
    options = parse(parser, arguments)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds; "
          "extra time in % of the step; off: percentage points")
    priced = (("by timed ops", "by the table") if options.backend == "eager"
              else ("by timed kernels",))
    table = Table("model:6", "budget:>6", "measured on the step:>22",
                  *(column for price in priced for column in (f"{price}:.1f", "off:+6.1f")))
    for name in options.model:
        compare(WORKLOADS[name](), options.backend, options.budgets, options.rounds,
                options.time_limit, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
