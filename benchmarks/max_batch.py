"""The largest batch: how much it grows with a plan, whether it is exact, and the classical figure.

    python -m benchmarks.max_batch growth --overhead 0.35
    python -m benchmarks.max_batch exact
    python -m benchmarks.max_batch classical --rounds 15

`growth`: the budget is the plain step's peak at some batch; how large a batch a plan makes fit in
it, at no more than some estimated extra time.  `exact`: the batch that was found is run and its
peak measured, without and with a plan, and so is the next batch, under the plan that needs the
least.  `classical`: see `benchmarks.classical`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import planner
from benchmarks.arguments import benchmark_parser, parse
from benchmarks.classical import classical
from benchmarks.measure import MEGABYTE, peak_bytes
from benchmarks.models import WORKLOADS, Workload
from planner.api import capture
from planner.search.planning import Effort, plan_within
from planner.step.prepared import PreparedStep

TARGETS = {"gpt2": 3.0, "bert": 3.0, "unet_full": 4.0}
"""How many times as large the batch is to be at 35% extra time."""
EXACT_MODELS = ("gpt2", "bert", "vit", "resnet")


def search(name: str, budget_bytes: int, time_limit: float,
           overhead: float | None = None) -> planner.LargestSize:
    """The largest batch of a model."""
    def loss(batch: int) -> Any:
        return WORKLOADS[name](batch=batch).loss_fn

    has_loss = WORKLOADS[name](batch=2).loss_fn is not None
    return planner.max_batch_size(
        lambda batch: WORKLOADS[name](batch=batch).inputs, WORKLOADS[name](batch=2).model,
        budget=budget_bytes, overhead=overhead, make_loss_fn=loss if has_loss else None,
        time_limit=time_limit)


def plain_peak(name: str, batch: int) -> int:
    """Predicted peak of the whole plain step."""
    workload = WORKLOADS[name](batch=batch)
    return capture(workload.model, workload.inputs, loss_fn=workload.loss_fn).baseline_peak_bytes


GROWTH_HEADER = (
    f"| {'model':<6} | {'budget MB':>9} | {'plain':>5} | {'planned':>7} | {'growth':>6} | "
    f"{'overhead %':>10} | {'per sample %':>12} | {'next':<32} | {'captures':>8} |\n"
    f"|{'-' * 8}|{'-' * 10}:|{'-' * 6}:|{'-' * 8}:|{'-' * 7}:|{'-' * 11}:|{'-' * 13}:|{'-' * 34}|"
    f"{'-' * 9}:|")


def growth(names: Sequence[str], batch: int, overhead: float, time_limit: float) -> bool:
    """Print the growth of each model; whether the targets are met."""
    print(GROWTH_HEADER, flush=True)
    ok = True
    for name in names:
        found = search(name, plain_peak(name, batch), time_limit, overhead)
        assert found.plan is not None and found.growth is not None
        assert found.plain_seconds_per_item and found.planned_seconds_per_item
        slower = found.planned_seconds_per_item / found.plain_seconds_per_item - 1
        following = "proven impossible" if found.proven else "no such plan found"
        print(f"| {name:<6} | {found.budget_bytes / MEGABYTE:>9.2f} | {found.plain:>5} | "
              f"{found.planned:>7} | {found.growth:>6.2f} | {100 * found.plan.overhead:>10.2f} | "
              f"{100 * slower:>12.2f} | {found.planned_next}: {following:<27} | "
              f"{found.captures:>8} |", flush=True)
        ok = ok and found.growth >= TARGETS.get(name, 0.0)
    return ok


EXACT_HEADER = (
    f"| {'model':<6} | {'budget MB':>9} | {'step':<7} | {'batch':>5} | {'measured MB':>11} | fits "
    f"| {'next':>4} | {'measured MB':>11} | fits |\n"
    f"|{'-' * 8}|{'-' * 10}:|{'-' * 9}|{'-' * 6}:|{'-' * 12}:|------"
    f"|{'-' * 5}:|{'-' * 12}:|------|")


@dataclass(frozen=True, slots=True)
class Pair:
    """Measured peaks of the batch that was found and of the next."""

    step: str
    batch: int
    peak_bytes: int
    following: int
    following_peak_bytes: int

    def is_exact(self, budget_bytes: int) -> bool:
        """Whether the one fits and the other does not."""
        return self.peak_bytes <= budget_bytes < self.following_peak_bytes


def exact(names: Sequence[str], batch: float, time_limit: float) -> bool:
    """Print, for each model, what the found and the next batch take; whether all are exact."""
    print(EXACT_HEADER, flush=True)
    ok = True
    for name in names:
        budget = int(plain_peak(name, 2) * batch / 2)
        found = search(name, budget, time_limit)
        for pair in (plain_pair(name, found), planned_pair(name, found, time_limit)):
            ok = ok and pair.is_exact(budget)
            print(f"| {name:<6} | {budget / MEGABYTE:>9.3f} | {pair.step:<7} | {pair.batch:>5} | "
                  f"{pair.peak_bytes / MEGABYTE:>11.3f} | "
                  f"{'yes' if pair.peak_bytes <= budget else 'NO':<4} | {pair.following:>4} | "
                  f"{pair.following_peak_bytes / MEGABYTE:>11.3f} | "
                  f"{'YES' if pair.following_peak_bytes <= budget else 'no':<4} |", flush=True)
    return ok


def plain_pair(name: str, found: planner.LargestSize) -> Pair:
    """The plain step at the largest batch and at the next."""
    assert found.plain is not None and found.plain_next is not None
    peaks = []
    for batch in (found.plain, found.plain_next):
        workload = WORKLOADS[name](batch=batch)
        peaks.append(held_bytes(workload) + peak_bytes(workload, workload.model))
    return Pair("plain", found.plain, peaks[0], found.plain_next, peaks[1])


def planned_pair(name: str, found: planner.LargestSize, time_limit: float) -> Pair:
    """The planned step at the largest batch, and the leanest that can be planned at the next."""
    assert found.plan is not None and found.planned is not None and found.planned_next is not None
    workload = WORKLOADS[name](batch=found.planned)
    peak = held_bytes(workload) + peak_bytes(workload, found.plan.apply(workload.model))
    workload = WORKLOADS[name](batch=found.planned_next)
    step = capture(workload.model, workload.inputs, loss_fn=workload.loss_fn)
    leanest = leanest_plan(step, found.budget_bytes, time_limit)
    following = held_bytes(workload) + peak_bytes(workload, leanest.apply(workload.model))
    return Pair("planned", found.planned, peak, found.planned_next, following)


def leanest_plan(step: PreparedStep, budget_bytes: int, time_limit: float) -> planner.Plan:
    """A plan within the budget, else one within the smallest that can be met."""
    while True:
        try:
            return plan_within(step, budget_bytes, Effort(time_limit=time_limit))
        except planner.InfeasibleBudget as refusal:  # on a busy machine maybe more than once
            budget_bytes = refusal.minimum_bytes


def held_bytes(workload: Workload) -> int:
    """Bytes of the storages of parameters, buffers and inputs, and of what the loss holds."""
    inputs = workload.inputs if isinstance(workload.inputs, tuple) else workload.inputs.values()
    closure = getattr(workload.loss_fn, "__closure__", None) or ()
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *inputs,
               *(cell.cell_contents for cell in closure)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes()
                for t in tensors if isinstance(t, torch.Tensor)}.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where a target is missed."""
    parser = benchmark_parser("max_batch", __doc__, models=(), rounds=15, threads=2,
                              time_limit=30.0)
    parser.add_argument("part", choices=("growth", "exact", "classical"))
    parser.add_argument("--batch", type=float, default=16,
                        help="the budget is the plain step's peak at about this batch")
    parser.add_argument("--overhead", type=float, default=0.35)
    parser.add_argument("--halvings", type=int, default=5,
                        help="of the budgets between which the plan of the same time is looked for")
    arguments = parse(parser, argv)
    if arguments.part == "growth":
        ok = growth(arguments.model or list(TARGETS), int(arguments.batch), arguments.overhead,
                    arguments.time_limit)
    elif arguments.part == "exact":
        ok = exact(arguments.model or EXACT_MODELS, arguments.batch, arguments.time_limit)
    else:
        ok = classical(arguments.rounds, arguments.time_limit, arguments.halvings)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
