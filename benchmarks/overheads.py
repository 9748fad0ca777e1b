"""Extra time of a plan, predicted and measured, under each model of an op's cost.

    python -m benchmarks.overheads --model gpt2,bert,vit,unet --budgets 80,60,45 --rounds 9

Budgets are percentages of the peak of the step in which nothing is recomputed.  A plan's measured
overhead is the median, over rounds in which all plans of a model run in turns, of its step time
over that of the plan without recomputation, less one, in seconds of CPU.  The plan is made with
`cost_model="measured"`; "by the table" prices the same schedule with `cost_model="roofline"`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.arguments import benchmark_parser, parse
from benchmarks.measure import run_step, time_in_turns
from benchmarks.models import WORKLOADS, Workload
from planner.api import capture
from planner.decisions import schedule_of
from planner.errors import InfeasibleBudget
from planner.plan import Plan
from planner.planning import Effort, PreparedStep, overhead_of, plan_within

PRICES = ("measured", "roofline")


def plans_at(prepared: PreparedStep, budgets: Sequence[float], time_limit: float) -> list[Plan]:
    """A plan for each budget that can be met."""
    plans = []
    for percent in budgets:
        try:
            plans.append(plan_within(prepared, int(prepared.keep_all_peak_bytes * percent / 100),
                                     Effort(time_limit=time_limit)))
        except InfeasibleBudget as refusal:
            print(f"{percent:g}%: {refusal}", file=sys.stderr)
    return plans


def compare(workload: Workload, budgets: Sequence[float], rounds: int, time_limit: float) -> None:
    """Measure one model's plans and print their lines."""
    steps = {name: capture(workload.model, workload.inputs, loss_fn=workload.loss_fn,
                           cost_model=name) for name in PRICES}
    prepared = steps["measured"]
    plans = plans_at(prepared, budgets, time_limit)
    models = [plan_within(prepared, None).apply(workload.model)]
    models += [plan.apply(workload.model) for plan in plans]
    times = time_in_turns([partial(run_step, workload, model) for model in models], rounds,
                          clock=time.process_time)
    share = prepared.keep_all_peak_bytes / 100
    for index, plan in enumerate(plans, start=1):
        schedule = schedule_of(prepared.graph, plan.recipe)
        predicted = [100 * overhead_of(steps[name].graph, schedule) for name in PRICES]
        ratio = times.ratio(index, 0)
        found = 100 * (ratio.median - 1)
        print(f"| {workload.name:<6} | {plan.budget_bytes / share:5.0f}% "
              f"| {found:6.1f} [{100 * (ratio.low - 1):5.1f} {100 * (ratio.high - 1):5.1f}] "
              + " ".join(f"| {value:8.1f} | {value - found:+6.1f}" for value in predicted) + " |",
              flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = benchmark_parser("overheads", __doc__, models=("gpt2", "bert", "vit", "unet"),
                              rounds=9, threads=1, time_limit=10.0)
    parser.add_argument("--budgets", default="80,60,45")
    options = parse(parser, arguments)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds; "
          "extra time in % of the step; off: percentage points")
    print("| model  | budget | measured on the step   | by timed ops |    off | by the table |    "
          "off |")
    print("|--------|-------:|-----------------------:|-------------:|-------:|-------------:|"
          "-------:|")
    for name in options.model:
        compare(WORKLOADS[name](), [float(x) for x in options.budgets.split(",")],
                options.rounds, options.time_limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
