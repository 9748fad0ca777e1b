"""The largest batch within the peak of a plain step, without a plan and with one.

    python -m benchmarks.max_batch --batch 8 --overhead 0.35
    python -m benchmarks.max_batch --model gpt2 --vocabulary 50257 --allow recompute,chunk

The budget is the plain step's peak at `--batch`; a plan may cost `--overhead` of estimated extra
time.  "Per sample" compares the estimated time of a sample with that of the plain step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import planner
from benchmarks.arguments import add_names, benchmark_parser, parse
from benchmarks.measure import MEGABYTE
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import Table


def grow(make: Callable[..., Workload], batch: int, overhead: float, time_limit: float,
         allow: Sequence[str]) -> planner.LargestSize:
    """Return the largest batches of a model."""
    def loss(size: int) -> Any:
        return make(batch=size).loss_fn

    start = make(batch=batch)
    return planner.max_batch_size(
        start.model, lambda size: make(batch=size).inputs, time_limit=time_limit,
        budget=start.prepare(allow=allow).baseline_peak_bytes, overhead=overhead, allow=allow,
        make_loss_fn=None if start.loss_fn is None else loss)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = benchmark_parser("max_batch", __doc__, models=("gpt2", "bert", "unet_full"),
                              threads=2, time_limit=30.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--overhead", type=float, default=0.35)
    parser.add_argument("--vocabulary", type=int, help="of language models")
    add_names(parser, "--allow", ("recompute", "chunk"), ("recompute",))
    arguments = parse(parser, argv)
    table = Table("model:6", "budget MB:.2f", "plain:d", "planned:d", "growth:.2f",
                  "extra time %:.2f", "per sample %:.2f", "next batch")
    for name in arguments.model:
        make: Callable[..., Workload] = WORKLOADS[name]
        if arguments.vocabulary is not None:
            make = partial(make, vocabulary=arguments.vocabulary)
        found = grow(make, arguments.batch, arguments.overhead, arguments.time_limit,
                     arguments.allow)
        assert found.plan is not None
        assert found.plain_seconds_per_item and found.planned_seconds_per_item
        slower = found.planned_seconds_per_item / found.plain_seconds_per_item - 1
        table.row(name, found.budget_bytes / MEGABYTE, found.plain, found.planned, found.growth,
                  100 * found.plan.overhead, 100 * slower,
                  "proven impossible" if found.proven else "no such plan found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
