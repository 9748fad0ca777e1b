"""The largest batch: how much it grows with a plan, and whether it is exact.

    python -m benchmarks.max_batch growth --overhead 0.35
    python -m benchmarks.max_batch growth --model gpt2 --vocabulary 50257 --allow recompute,chunk
    python -m benchmarks.max_batch exact

`growth`: the budget is the plain step's peak at some batch; how large a batch a plan makes fit in
it, at no more than some estimated extra time.  `exact`: the batch that was found is run and its
peak measured, without and with a plan, and so is the next batch, under the plan that needs the
least.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import planner
from benchmarks.arguments import add_names, benchmark_parser, parse
from benchmarks.measure import (
    MEGABYTE,
    held_by_loss,
    peak_bytes,
    plan_or_smallest,
    storage_bytes,
)
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import Table

TARGETS = {"gpt2": 3.0, "bert": 3.0, "unet_full": 4.0}
"""How many times as large the batch is to be at 35% extra time."""
EXACT_MODELS = ("gpt2", "bert", "vit", "resnet")


def search(make: Callable[..., Workload], budget_bytes: int, time_limit: float,
           overhead: float | None = None, **arguments: Any) -> planner.LargestSize:
    """The largest batch of a model; `arguments`: others of `planner.plan`."""
    def loss(batch: int) -> Any:
        return make(batch=batch).loss_fn

    smallest = make(batch=2)
    return planner.max_batch_size(
        lambda batch: make(batch=batch).inputs, smallest.model, budget=budget_bytes,
        overhead=overhead, make_loss_fn=None if smallest.loss_fn is None else loss,
        time_limit=time_limit, **arguments)


def growth(names: Sequence[str], batch: int, overhead: float, time_limit: float,
           vocabulary: int | None = None, **arguments: Any) -> bool:
    """Print the growth of each model; whether the targets are met.  `vocabulary`: of language
    models, in place of the benchmark's; `arguments`: others of `planner.plan`."""
    table = Table("model:6", "budget MB:.2f", "plain:d", "planned:d", "growth:.2f",
                  "overhead %:.2f", "per sample %:.2f", "next:32", "captures:d")
    ok = True
    for name in names:
        make: Callable[..., Workload] = WORKLOADS[name]
        if vocabulary is not None:
            make = partial(make, vocabulary=vocabulary)
        budget_bytes = make(batch=batch).prepare(**arguments).baseline_peak_bytes
        found = search(make, budget_bytes, time_limit, overhead, **arguments)
        assert found.plan is not None and found.growth is not None
        assert found.plain_seconds_per_item and found.planned_seconds_per_item
        slower = found.planned_seconds_per_item / found.plain_seconds_per_item - 1
        following = "proven impossible" if found.proven else "no such plan found"
        table.row(name, found.budget_bytes / MEGABYTE, found.plain, found.planned, found.growth,
                  100 * found.plan.overhead, 100 * slower, f"{found.planned_next}: {following}",
                  found.captures)
        ok = ok and found.growth >= TARGETS.get(name, 0.0)
    return ok


def exact(names: Sequence[str], batch: float, time_limit: float) -> bool:
    """Print, for each model, what the found and the next batch take; whether the one fits and the
    other does not, wherever."""
    table = Table("model:6", "budget MB:.3f", "step:7", "batch:d", "measured MB:.3f", "fits",
                  "next:d", "measured MB:.3f", "fits")
    ok = True
    for name in names:
        budget = int(WORKLOADS[name](batch=2).prepare().baseline_peak_bytes * batch / 2)
        found = search(WORKLOADS[name], budget, time_limit)
        assert found.plain is not None and found.plain_next is not None
        assert found.plan is not None and found.planned is not None
        assert found.planned_next is not None
        # Planned at the next batch: the plan that needs the least.
        leanest = plan_or_smallest(WORKLOADS[name](batch=found.planned_next).prepare(),
                                   found.budget_bytes, time_limit)
        for step, fitting, following in (
                ("plain", (found.plain, None), (found.plain_next, None)),
                ("planned", (found.planned, found.plan), (found.planned_next, leanest))):
            peak, next_peak = measured_peak(name, *fitting), measured_peak(name, *following)
            ok = ok and peak <= budget < next_peak
            table.row(name, budget / MEGABYTE, step, fitting[0], peak / MEGABYTE,
                      "yes" if peak <= budget else "NO", following[0], next_peak / MEGABYTE,
                      "YES" if next_peak <= budget else "no")
    return ok


def measured_peak(name: str, batch: int, plan: planner.Plan | None) -> int:
    """The measured peak of a whole step, of the plain one without a plan."""
    workload = WORKLOADS[name](batch=batch)
    model, inputs = workload.model, workload.inputs
    held = storage_bytes([
        *model.parameters(), *model.buffers(), *held_by_loss(workload),
        *(inputs if isinstance(inputs, tuple) else inputs.values())])
    return held + peak_bytes(workload, model if plan is None else plan.apply(model))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where a target is missed."""
    parser = benchmark_parser("max_batch", __doc__, models=(), threads=2, time_limit=30.0)
    parser.add_argument("part", choices=("growth", "exact"))
    parser.add_argument("--batch", type=float, default=16,
                        help="the budget is the plain step's peak at about this batch")
    parser.add_argument("--overhead", type=float, default=0.35)
    parser.add_argument("--vocabulary", type=int, help="of language models, for growth")
    add_names(parser, "--allow", ("recompute", "chunk"), ("recompute",))
    parser.add_argument("--output", choices=("held", "dropped"), default="held")
    arguments = parse(parser, argv)
    if arguments.part == "growth":
        ok = growth(arguments.model or list(TARGETS), int(arguments.batch), arguments.overhead,
                    arguments.time_limit, arguments.vocabulary, allow=arguments.allow,
                    output=arguments.output)
    else:
        ok = exact(arguments.model or EXACT_MODELS, arguments.batch, arguments.time_limit)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
