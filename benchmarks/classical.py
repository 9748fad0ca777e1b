"""All-or-nothing checkpointing beside plans of the same memory and of the same time, in one run.

    python -m benchmarks.max_batch classical --rounds 15

Hugging Face's gradient checkpointing of every layer of a BERT is the classical figure: about 60%
less peak for about 25% more time.  The plan of the same memory has its peak as the budget.  The
plan of the same time is found by bisection on the budget: each plan is applied and timed beside
checkpointing, in turns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

import planner
from benchmarks.measure import MEGABYTE, peak_bytes, run_step, time_in_turns
from benchmarks.models import WORKLOADS, Workload
from planner.api import capture
from planner.search.planning import Effort, plan_within
from planner.step.prepared import PreparedStep

HEADER = (
    f"| {'step':<30} | {'peak MB':>8} | {'less peak %':>11} | {'time, of the plain step':<23} | "
    f"{'estimated %':>11} |\n|{'-' * 32}|{'-' * 9}:|{'-' * 12}:|{'-' * 25}|{'-' * 12}:|")


@dataclass(frozen=True, eq=False)
class Contender:
    """A way to run the step."""

    name: str
    model: nn.Module
    peak_bytes: int
    overhead: float | None = None
    """Estimated; `None` where there is no plan."""


def contender(name: str, workload: Workload, plan: planner.Plan) -> Contender:
    """A plan, applied and its peak measured."""
    model = plan.apply(workload.model)
    return Contender(name, model, peak_bytes(workload, model), plan.overhead)


def classical(rounds: int, time_limit: float, halvings: int) -> bool:
    """Print gradient checkpointing of every layer beside plans; whether the plans are better.

    `halvings`: of the interval of budgets that holds the plan of the same time.
    """
    workload = WORKLOADS["bert"]()
    checkpointed = copy.deepcopy(workload.model)
    checkpointed.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False})
    step = capture(workload.model, workload.inputs, loss_fn=workload.loss_fn)
    effort = Effort(time_limit=time_limit)
    plain = Contender("plain", workload.model, peak_bytes(workload, workload.model))
    theirs = Contender("gradient_checkpointing_enable", checkpointed,
                       peak_bytes(workload, checkpointed))
    same_memory = contender("plan, same memory", workload, plan_within(
        step, step.resident_bytes + theirs.peak_bytes, effort))

    def time_of(ours: Contender) -> float:
        steps = [partial(run_step, workload, each.model) for each in (ours, theirs)]
        return time_in_turns(steps, max(5, rounds // 2)).ratio(0, 1).median

    same_time = plan_of_the_same_time(workload, step, effort, theirs.peak_bytes, time_of, halvings)
    contenders = [plain, theirs, same_memory, same_time]
    times = time_in_turns([partial(run_step, workload, each.model) for each in contenders], rounds)
    print(HEADER)
    for index, each in enumerate(contenders):
        overhead = "" if each.overhead is None else f"{100 * each.overhead:.1f}"
        print(f"| {each.name:<30} | {each.peak_bytes / MEGABYTE:>8.2f} | "
              f"{100 * (1 - each.peak_bytes / plain.peak_bytes):>11.1f} | "
              f"{times.ratio(index, 0)!s:<23} | {overhead:>11} |", flush=True)
    print(f"at the same memory the plan takes {times.ratio(2, 1)} of its time; at "
          f"{times.ratio(3, 1)} of its time the plan takes "
          f"{same_time.peak_bytes / theirs.peak_bytes:.2f} of its peak")
    return times.ratio(2, 1).median < 1 and same_time.peak_bytes < theirs.peak_bytes


def plan_of_the_same_time(workload: Workload, step: PreparedStep, effort: Effort, peak: int,
                          time_of: Callable[[Contender], float], halvings: int) -> Contender:
    """The plan of the smallest peak that was no slower than the other step; at most `peak`, above
    resident memory.  `time_of`: measured, as a fraction of the other step's."""
    lowest, plan = smallest_plan(step, effort)
    best = contender("plan, same time", workload, plan)
    ratio = time_of(best)
    print(f"smallest plan: {lowest / MEGABYTE:.2f} MB, {ratio:.3f} of its time", flush=True)
    if ratio <= 1:
        return best
    high = peak
    for _ in range(halvings):
        middle = (lowest + high) // 2
        tried = contender("plan, same time", workload,
                          plan_within(step, step.resident_bytes + middle, effort))
        ratio = time_of(tried)
        print(f"plan of {middle / MEGABYTE:.2f} MB: {ratio:.3f} of its time", flush=True)
        if ratio <= 1:
            best, high = tried, middle
        else:
            lowest = middle
    return best


def smallest_plan(step: PreparedStep, effort: Effort) -> tuple[int, planner.Plan]:
    """The smallest budget that can be met, above resident memory, and its plan."""
    try:
        plan = plan_within(step, step.resident_bytes, effort)
    except planner.InfeasibleBudget as refusal:
        plan = plan_within(step, refusal.minimum_bytes, effort)
    return plan.peak_bytes - step.resident_bytes, plan
