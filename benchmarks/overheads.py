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
from functools import partial

import torch

from benchmarks.arguments import benchmark_parser, parse
from benchmarks.measure import run_step, time_in_turns
from benchmarks.models import WORKLOADS, Workload
from planner.api import capture
from planner.arguments.planning import BACKENDS
from planner.errors import InfeasibleBudget
from planner.plans.decisions import schedule_of
from planner.plans.plan import Plan
from planner.search.planning import Effort, plan_within
from planner.step.prepared import PreparedStep

PRICES = ("measured", "roofline")


def plan_at(prepared: PreparedStep, budget_bytes: int, time_limit: float) -> Plan:
    """The plan for a budget, or for the smallest that can be met."""
    try:
        return plan_within(prepared, budget_bytes, Effort(time_limit=time_limit))
    except InfeasibleBudget as refusal:
        return plan_within(prepared, refusal.minimum_bytes, Effort(time_limit=time_limit))


def compare(workload: Workload, backend: str, budgets: Sequence[float], rounds: int,
            time_limit: float) -> None:
    """Measure one model's plans and print their lines."""
    prices = PRICES if backend == "eager" else PRICES[:1]
    steps = {name: capture(workload.model, workload.inputs, loss_fn=workload.loss_fn,
                           backend=backend, cost_model=name) for name in prices}
    prepared = steps["measured"]
    keep_all = plan_within(prepared, None)
    below = 0 if backend == "eager" else prepared.resident_bytes
    share = (keep_all.peak_bytes - below) / 100
    plans = [plan_at(prepared, below + int(share * percent), time_limit) for percent in budgets]
    models = [plan.apply(workload.model) for plan in (keep_all, *plans)]
    times = time_in_turns([partial(run_step, workload, model) for model in models], rounds,
                          clock=time.process_time)
    for index, plan in enumerate(plans, start=1):
        predicted = [100 * plan.overhead]
        if backend == "eager":
            forms = [steps[name].form_of(plan.recipe) for name in prices]
            schedule = schedule_of(forms[0], plan.recipe)
            predicted = [100 * form.overhead(schedule) for form in forms]
        ratio = times.ratio(index, 0)
        found = 100 * (ratio.median - 1)
        print(f"| {workload.name:<6} | {(plan.budget_bytes - below) / share:5.0f}% "
              f"| {found:6.1f} [{100 * (ratio.low - 1):5.1f} {100 * (ratio.high - 1):5.1f}] "
              + " ".join(f"| {value:8.1f} | {value - found:+6.1f}" for value in predicted) + " |",
              flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = benchmark_parser("overheads", __doc__, models=("gpt2", "bert", "vit", "unet"),
                              rounds=9, threads=1, time_limit=10.0)
    parser.add_argument("--budgets", default="80,60,45")
    parser.add_argument("--backend", choices=BACKENDS, default="eager")
    options = parse(parser, arguments)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds; "
          "extra time in % of the step; off: percentage points")
    if options.backend == "eager":
        print("| model  | budget | measured on the step   | by timed ops |    off | by the table |"
              "    off |")
        print("|--------|-------:|-----------------------:|-------------:|-------:|-------------:|"
              "-------:|")
    else:
        print("| model  | budget | measured on the step   | by timed kernels |    off |")
        print("|--------|-------:|-----------------------:|-----------------:|-------:|")
    for name in options.model:
        compare(WORKLOADS[name](), options.backend, [float(x) for x in options.budgets.split(",")],
                options.rounds, options.time_limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
