"""Step times in turns: plain, planned, per-layer checkpointing, and planned at its peak.

    python -m benchmarks.step_time --model gpt2,bert,llama,t5,vit,resnet,unet --rounds 15

All steps of a model run in turns in one process; times are medians [quartiles] of the ratios within
a round, so that other load affects all of them alike.  Peaks are allocator events of forward, loss
and backward above resident memory.  Convolutional models have no per-layer checkpointing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.arguments import benchmark_parser, parse
from benchmarks.measure import MEGABYTE, peak_bytes, time_steps, with_gradient_checkpointing
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import Table
from planner.search.planning import Effort, plan_within


def compare(workload: Workload, rounds: int, time_limit: float, table: Table) -> None:
    """Measure one model and print its rows."""
    prepared = workload.prepare()
    models: dict[str, nn.Module] = {"plain": workload.model}
    models["planned, no budget"] = plan_within(prepared, None).apply(workload.model)
    estimates = {"planned, no budget": 0.0}
    checkpointed = with_gradient_checkpointing(workload)
    if checkpointed is not None:
        models["per-layer checkpointing"] = checkpointed
        budget = prepared.resident_bytes + peak_bytes(workload, checkpointed)
        plan = plan_within(prepared, budget, Effort(time_limit=time_limit))
        models["planned at its peak"] = plan.apply(workload.model)
        estimates["planned at its peak"] = plan.overhead
    peaks = [peak_bytes(workload, model) for model in models.values()]
    times = time_steps(workload, models.values(), rounds)
    for index, name in enumerate(models):
        against = times.ratio(index, 2) if index == 3 else None
        table.row(workload.name, name, peaks[index] / MEGABYTE, times.ratio(index, 0), against,
                  estimates.get(name))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = benchmark_parser(
        "step_time", __doc__, models=("gpt2", "bert", "llama", "t5", "vit", "resnet", "unet"),
        rounds=15, threads=2, time_limit=30.0)
    arguments = parse(parser, argv)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds")
    table = Table("model:6", "step:24", "peak MB:8.2f", "of the plain time:19",
                  "of checkpointing's:19", "estimated extra:.1%")
    for name in arguments.model:
        compare(WORKLOADS[name](), arguments.rounds, arguments.time_limit, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
