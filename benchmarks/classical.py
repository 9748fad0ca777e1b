"""All-or-nothing checkpointing beside plans of the same memory and of the same time, in one run.

    python -m benchmarks.max_batch classical --rounds 15

Hugging Face's gradient checkpointing of every layer of a BERT is the classical figure: about 60%
less peak for about 25% more time.  The plan of the same memory has its peak as the budget.  The
plan of the same time is found by bisection on the budget: each plan is applied and timed beside
checkpointing, in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

import planner
from benchmarks.measure import (
    MEGABYTE,
    peak_bytes,
    plan_or_smallest,
    time_steps,
    with_gradient_checkpointing,
)
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import Table
from planner.step.prepared import PreparedStep


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
    checkpointed = with_gradient_checkpointing(workload)
    assert checkpointed is not None
    step = workload.prepare()
    plain = Contender("plain", workload.model, peak_bytes(workload, workload.model))
    theirs = Contender("gradient_checkpointing_enable", checkpointed,
                       peak_bytes(workload, checkpointed))
    same_memory = contender("plan, same memory", workload, plan_or_smallest(
        step, step.resident_bytes + theirs.peak_bytes, time_limit))

    def time_of(ours: Contender) -> float:
        models = (ours.model, theirs.model)
        return time_steps(workload, models, max(5, rounds // 2)).ratio(0, 1).median

    same_time = plan_of_the_same_time(workload, step, time_limit, theirs.peak_bytes, time_of,
                                      halvings)
    contenders = [plain, theirs, same_memory, same_time]
    times = time_steps(workload, [each.model for each in contenders], rounds)
    table = Table("step:30", "peak MB:8.2f", "less peak %:.1f", "time, of the plain step",
                  "estimated %:.1f")
    for index, each in enumerate(contenders):
        table.row(each.name, each.peak_bytes / MEGABYTE,
                  100 * (1 - each.peak_bytes / plain.peak_bytes), times.ratio(index, 0),
                  None if each.overhead is None else 100 * each.overhead)
    print(f"at the same memory the plan takes {times.ratio(2, 1)} of its time; at "
          f"{times.ratio(3, 1)} of its time the plan takes "
          f"{same_time.peak_bytes / theirs.peak_bytes:.2f} of its peak")
    return times.ratio(2, 1).median < 1 and same_time.peak_bytes < theirs.peak_bytes


def plan_of_the_same_time(workload: Workload, step: PreparedStep, time_limit: float, peak: int,
                          time_of: Callable[[Contender], float], halvings: int) -> Contender:
    """The plan of the smallest peak that was no slower than the other step; at most `peak`, above
    resident memory.  `time_of`: measured, as a fraction of the other step's."""
    plan = plan_or_smallest(step, step.resident_bytes, time_limit)
    lowest = plan.peak_bytes - step.resident_bytes
    best = contender("plan, same time", workload, plan)
    ratio = time_of(best)
    print(f"smallest plan: {lowest / MEGABYTE:.2f} MB, {ratio:.3f} of its time", flush=True)
    if ratio <= 1:
        return best
    high = peak
    for _ in range(halvings):
        middle = (lowest + high) // 2
        tried = contender("plan, same time", workload,
                          plan_or_smallest(step, step.resident_bytes + middle, time_limit))
        ratio = time_of(tried)
        print(f"plan of {middle / MEGABYTE:.2f} MB: {ratio:.3f} of its time", flush=True)
        if ratio <= 1:
            best, high = tried, middle
        else:
            lowest = middle
    return best
