"""Step times: the applied model without recomputation against the plain eager step, and under the
memory of Hugging Face's gradient checkpointing against that.

    python -m benchmarks.step_time --model gpt2,bert,llama,t5,resnet,unet,vit --rounds 15

All alternatives of a model run in turns in one process, and what is reported is the median of the
ratios within a round, with quartiles: other load on the machine then meets all of them alike.
Peaks are those of forward, loss and backward above resident memory.

With `--halvings N` there is also the plan that takes no more time than gradient checkpointing, by
bisection on the budget, in so many steps: each plan is applied and timed beside checkpointing.

`--profile` prints where the applied model's time goes, op by op, beside the plain step's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.arguments import benchmark_parser, parse
from benchmarks.measure import (
    MEGABYTE,
    Times,
    peak_bytes,
    plan_or_smallest,
    run_step,
    time_steps,
    with_gradient_checkpointing,
)
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import Table
from planner.errors import InfeasibleBudget
from planner.plans.plan import Plan
from planner.search.planning import Effort, plan_within
from planner.step.prepared import PreparedStep

TARGETS = {"gpt2": 1.05, "bert": 1.05, "llama": 1.10, "t5": 1.10, "resnet": 1.10, "unet": 1.15}
"""The most that the applied model without recomputation may take, in plain steps."""


def compare(workload: Workload, rounds: int, time_limit: float, halvings: int, show_profile: bool,
            table: Table) -> bool:
    """Measure one model and print its lines; whether it meets its targets."""
    plain = workload.model
    prepared = workload.prepare()
    keep_all = plan_within(prepared, None).apply(plain)
    models = {"plain": plain, "nothing recomputed": keep_all}
    checkpointed = with_gradient_checkpointing(workload)
    notes = dict.fromkeys(models, "")
    if checkpointed is not None:
        budget = prepared.resident_bytes + peak_bytes(workload, checkpointed)
        models["gradient_checkpointing_enable"] = checkpointed
        try:
            plan = plan_within(prepared, budget, Effort(time_limit=time_limit))
        except InfeasibleBudget as refusal:
            print(f"{workload.name}: no plan at the memory of gradient_checkpointing_enable(): "
                  f"{refusal}")
            return False
        plans = {"planned at its peak": (plan, plan.apply(plain))}
        if halvings:
            plans["planned in its time"] = plan_in_the_same_time(
                workload, prepared, checkpointed, budget, time_limit, rounds, halvings)
        for name, (plan, model) in plans.items():
            models[name] = model
            notes[name] = (f"estimated {plan.overhead:.1%}, bound {plan.overhead_bound:.1%}, "
                           f"{plan.status}")
    peaks = {name: peak_bytes(workload, model) for name, model in models.items()}
    times = time_steps(workload, models.values(), rounds)
    names = list(models)
    for index, name in enumerate(names):
        table.row(workload.name, name, peaks[name] / MEGABYTE,
                  100 * (1 - peaks[name] / peaks["plain"]), times.typical_seconds(index),
                  times.ratio(index, 0), notes.get(name))
    if show_profile:
        print_profile(workload, plain, keep_all, rounds)
    return met(workload.name, names, times, peaks)


def plan_in_the_same_time(
    workload: Workload, prepared: PreparedStep, checkpointed: nn.Module, high: int,
    time_limit: float, rounds: int, halvings: int,
) -> tuple[Plan, nn.Module]:
    """The plan of the smallest peak that was no slower than `checkpointed`, and the model under it;
    the budget is at most `high`."""
    def tried(budget_bytes: int) -> tuple[Plan, nn.Module, float]:
        plan = plan_or_smallest(prepared, budget_bytes, time_limit)
        model = plan.apply(workload.model)
        ratio = time_steps(workload, (model, checkpointed), max(5, rounds // 2)).ratio(0, 1).median
        print(f"plan of {(plan.peak_bytes - prepared.resident_bytes) / MEGABYTE:.2f} MB: "
              f"{ratio:.3f} of its time", flush=True)
        return plan, model, ratio

    best = tried(prepared.resident_bytes)
    low = best[0].peak_bytes
    for _ in range(halvings if best[2] > 1 else 0):
        middle = (low + high) // 2
        found = tried(middle)
        if found[2] <= 1:
            best, high = found, middle
        else:
            low = middle
    return best[:2]


def met(model: str, names: Sequence[str], times: Times, peaks: Mapping[str, int]) -> bool:
    """Print the verdicts on one model."""
    ratio = times.ratio(names.index("nothing recomputed"), 0)
    limit = TARGETS.get(model)
    ok = limit is None or ratio.median <= limit
    if limit is not None:
        print(f"{model}: nothing recomputed takes {ratio.median:.3f} plain steps, at most {limit} "
              f"wanted: {'met' if ok else 'MISSED'}")
    if "planned at its peak" in names:
        planned = times.ratio(names.index("planned at its peak"),
                              names.index("gradient_checkpointing_enable"))
        print(f"{model}: planned takes {planned} of the time of gradient_checkpointing_enable(), "
              f"less than 1 wanted: {'met' if planned.median < 1 else 'MISSED'}")
        ok = ok and planned.median < 1
    if "planned in its time" in names:
        share = peaks["planned in its time"] / peaks["gradient_checkpointing_enable"]
        print(f"{model}: in its time the plan takes {share:.2f} of its peak")
        ok = ok and share < 1
    return ok


def print_profile(workload: Workload, plain: nn.Module, applied: nn.Module, rounds: int) -> None:
    """Time of each kernel in both, largest difference first."""
    totals: list[dict[str, tuple[float, int]]] = []
    for model in (plain, applied):
        run_step(workload, model)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            for _ in range(rounds):
                run_step(workload, model)
        totals.append({event.key: (event.self_cpu_time_total / rounds / 1e3, event.count // rounds)
                       for event in profiler.key_averages()})
    nothing = (0.0, 0)
    before, after = totals
    keys = sorted(before.keys() | after.keys(), reverse=True, key=lambda key: abs(
        after.get(key, nothing)[0] - before.get(key, nothing)[0]))
    print(f"  {'kernel: self ms (calls)':<56} {'plain':>16} {'applied':>16} {'difference':>10}")
    for key in keys[:20]:
        (ms, calls), (applied_ms, applied_calls) = before.get(key, nothing), after.get(key, nothing)
        print(f"  {key[:56]:<56} {ms:>9.2f} ({calls:>4}) {applied_ms:>9.2f} ({applied_calls:>4}) "
              f"{applied_ms - ms:>10.2f}")
    total = [sum(ms for ms, _ in part.values()) for part in totals]
    print(f"  {'all':<56} {total[0]:>9.2f} {'':6} {total[1]:>9.2f} {'':6} "
          f"{total[1] - total[0]:>10.2f}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where a target is missed."""
    parser = benchmark_parser(
        "step_time", __doc__, models=("gpt2", "bert", "llama", "t5", "vit", "resnet", "unet"),
        rounds=15, threads=2, time_limit=30.0)
    parser.add_argument("--halvings", type=int, default=0,
                        help="of the budgets between which the plan of the same time is looked for")
    parser.add_argument("--profile", action="store_true", help="compare the steps kernel by kernel")
    arguments = parse(parser, argv)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds; "
          "ratios: median [quartiles]", flush=True)
    table = Table("model:6", "step:29", "peak MB:8.2f", "less peak %:.1f", "seconds:.3f",
                  "of the plain step:19", "plan")
    ok = [compare(WORKLOADS[name](), arguments.rounds, arguments.time_limit, arguments.halvings,
                  arguments.profile, table) for name in arguments.model]
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
