"""Memory of one rank of many, plain and planned: predictions against real ranks with gloo.

    python -m benchmarks.planned_ranks --model gpt2,bert --budget "80%,60%,40%,least,layers"

All rows of a model and a wrapper are one run of several processes.  Each process trains the model
from the same seeds: unchanged in its wrapper, with every layer checkpointed, and with each plan
applied before wrapping.  The third step is measured, and the largest peak of any rank counts.  The
budget `layers` is the predicted peak with every layer checkpointed; its measured peak is in the
last line.  `gradients` is the distance of the gradients (their shards) of the third step from those
without a plan.  `collectives` are those of one step, by the profiler, and `as plain` says whether
there are as many of each kind, of as many elements in all.  `time` is that of a planned step as a
ratio to the plain one, `to layers` to that with every layer checkpointed, both the median
[quartiles] of rounds in which all take turns; `planned` is the plan's estimate.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

import planner
from benchmarks.arguments import add_names, benchmark_parser, parse
from benchmarks.measure import (
    MEGABYTE,
    Times,
    held_by_loss,
    plan_or_smallest,
    storage_bytes,
    thorough,
    with_gradient_checkpointing,
)
from benchmarks.models import WORKLOADS, Workload
from benchmarks.settled_collectives import settle_collectives
from benchmarks.table import Table
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.plain_step.loss import objective
from planner.search.planning import plan_within
from planner.search.variants import Effort
from planner.step.prepared import PreparedStep
from planner.step.rank_layout import unit_names

STEPS: dict[str, Callable[[], Workload]] = {
    **{name: partial(WORKLOADS[name], batch=8, sequence=128, width=128)
       for name in ("gpt2", "bert", "llama")},
    "vit": partial(WORKLOADS["vit"], batch=8, width=128),
}
WRAPPERS: dict[str, Mapping[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "ddp, bucket views": {"kind": "ddp", "gradient_as_bucket_view": True},
    "zero1": {"kind": "zero1"},
    "fsdp2": {"kind": "fsdp2"},
    "fsdp2, kept": {"kind": "fsdp2", "reshard_after_forward": False},
}
PLAIN, LAYERS = "plain", "layers"
_COLLECTIVES = ("gloo:", "nccl:")


@dataclass(frozen=True, slots=True)
class Trained:
    """One way to train, on this rank, after its third step."""

    resident_bytes: int
    """Parameters, buffers, inputs, optimizer state, and the buckets of the wrapper."""
    peak_bytes: int
    gradients: torch.Tensor
    collectives: tuple[Counter[str], Counter[str]]
    """Number of collectives of each kind in a step, and of their elements in all."""
    step: Callable[[], None]


def plan_for(workload: Workload, parallel: planner.DataParallel, step: PreparedStep, budget: str,
             time_limit: float) -> planner.Plan:
    """Return the plan of one rank's step; `least`: for the smallest feasible budget; `layers`: for
    the peak with every layer checkpointed."""
    if budget == "least":
        return plan_or_smallest(thorough(step, time_limit))
    if budget == LAYERS:
        limit = planner.data_parallel(
            with_gradient_checkpointing(workload), workload.inputs, parallel=parallel,
            loss_fn=workload.loss_fn, optimizer="adamw").peak_bytes
    else:
        limit = step.baseline_peak_bytes * int(budget.removesuffix("%")) // 100
    return plan_within(step, limit, Effort(time_limit=time_limit))


def wrap(model: nn.Module, parallel: planner.DataParallel) -> Callable[..., Any]:
    """Wrap the model for its rank."""
    if parallel.kind in ("ddp", "zero1"):
        # All ranks make the same model; broadcasting it would affect the measurement.
        return DistributedDataParallel(
            model, gradient_as_bucket_view=parallel.gradient_as_bucket_view, init_sync=False)
    mesh = init_device_mesh("cpu", (parallel.ranks,))
    units = [model.get_submodule(name) for unit in unit_names(model, parallel.units)
             for name in unit]
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=parallel.reshard_after_forward)
        settle_collectives(unit)
    return model


def make_optimizer(model: nn.Module, parallel: planner.DataParallel) -> Optimizer:
    """Return AdamW on one rank."""
    if parallel.kind == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3)
    return AdamW(model.parameters(), lr=1e-3)


def train_here(workload: Workload, parallel: planner.DataParallel) -> Trained:
    """Train on this rank, and return the measured third step with its gradients."""
    wrapped: list[Callable[..., Any]] = []
    record = record_peak(lambda: wrapped.append(wrap(workload.model, parallel)), "cpu")
    buckets = record.end_bytes if parallel.kind in ("ddp", "zero1") else 0
    stepper = make_optimizer(workload.model, parallel)

    def update() -> None:
        output = workload.call(wrapped[0])
        objective(output, workload.loss_fn).backward()
        stepper.step()

    for _ in range(2):
        update()
        stepper.zero_grad(set_to_none=True)
    resident = buckets + storage_bytes([
        *workload.model.parameters(), *workload.model.buffers(), *held_by_loss(workload),
        *pytree.tree_leaves(workload.inputs), *pytree.tree_leaves(_state_of(stepper))])
    peak = resident + record_peak(update, "cpu").peak_bytes
    gradients = torch.cat([_local(p.grad).flatten() for p in workload.model.parameters()
                           if p.grad is not None])
    step = partial(_step, workload, wrapped[0], make_optimizer(workload.model, parallel))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        step()
    collectives: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for event in seen.events():
        if event.name.startswith(_COLLECTIVES):
            collectives[event.name] += 1
            elements[event.name] += sum(math.prod(shape) for shape in event.input_shapes)
    return Trained(resident, peak, gradients, (collectives, elements), step)


def _state_of(optimizer: Optimizer) -> list[object]:
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return [value for state in inner.state.values() for value in state.values()]


def _step(workload: Workload, model: Callable[..., Any], stepper: Optimizer) -> None:
    stepper.zero_grad(set_to_none=True)
    objective(workload.call(model), workload.loss_fn).backward()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _rank(rank: int, port: int, ranks: int, name: str, wrapper: str, plan_paths: dict[str, str],
          rounds: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    parallel = planner.DataParallel(ranks=ranks, **WRAPPERS[wrapper])
    try:
        trained = {}
        for way in (PLAIN, LAYERS, *plan_paths):
            workload = STEPS[name]()
            model = (with_gradient_checkpointing(workload) if way == LAYERS else
                     workload.model if way == PLAIN else
                     planner.load(plan_paths[way]).apply(workload.model))
            torch.manual_seed(1)
            trained[way] = train_here(
                Workload(name, model, workload.inputs, workload.loss_fn), parallel)
            gc.collect()
        seconds: dict[str, list[float]] = {way: [] for way in trained}
        for _ in range(rounds):
            for way, each in trained.items():
                dist.barrier()
                began = time.perf_counter()
                each.step()
                seconds[way].append(time.perf_counter() - began)
        plain = trained[PLAIN]
        Path(folder, str(rank)).write_text(json.dumps({way: {
            "peak": each.peak_bytes,
            "resident": each.resident_bytes,
            "off": ((each.gradients - plain.gradients).norm() / plain.gradients.norm()).item(),
            "collectives": sum(each.collectives[0].values()),
            "same": each.collectives == plain.collectives,
            **{f"to {base}": _ratio(seconds[way], seconds[base]) for base in (PLAIN, LAYERS)},
        } for way, each in trained.items()}))
    finally:
        dist.destroy_process_group()


def _ratio(seconds: Sequence[float], base: Sequence[float]) -> str | None:
    return str(Times((tuple(seconds), tuple(base))).ratio(0, 1)) if len(seconds) > 1 else None


def run(name: str, wrapper: str, ranks: int, plans: Mapping[str, planner.Plan], rounds: int = 0
        ) -> list[dict[str, dict[str, Any]]]:
    """Return the results of each rank for each plan, the unchanged step, and every layer
    checkpointed."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        paths = {budget: str(Path(folder, f"{number}.json"))
                 for number, budget in enumerate(plans)}
        for budget, plan in plans.items():
            plan.save(paths[budget])
        spawn(_rank, (port, ranks, name, wrapper, paths, rounds, folder), nprocs=ranks)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def compare(name: str, wrapper: str, arguments: argparse.Namespace, table: Table) -> bool:
    """Print the rows of a model in a wrapper; return whether budgets hold and all results are as
    without a plan."""
    parallel = planner.DataParallel(ranks=arguments.ranks, **WRAPPERS[wrapper])
    workload = STEPS[name]()
    step = workload.prepare(parallel=parallel, optimizer="adamw", regions=arguments.regions)
    plans, refused = {}, {}
    for budget in arguments.budget.split(","):
        try:
            plans[f"to {budget}"] = plan_for(workload, parallel, step, budget,
                                             arguments.time_limit)
        except planner.InfeasibleBudget as refusal:
            refused[budget] = refusal
    seen = run(name, wrapper, arguments.ranks, plans, arguments.rounds)
    plain = max(each[PLAIN]["peak"] for each in seen)
    held = True
    for way, plan in plans.items():
        ranks = [each[way] for each in seen]
        fullest = max(each["peak"] for each in ranks)
        limit = plan.budget_bytes or plan.baseline_peak_bytes
        is_same = all(each["same"] for each in ranks)
        table.row(name, wrapper, way[3:], limit / MEGABYTE, plan.peak_bytes / MEGABYTE,
                  fullest / MEGABYTE, 100 * (plan.peak_bytes / fullest - 1), plain / MEGABYTE,
                  max(each["off"] for each in ranks), ranks[0]["collectives"], str(is_same),
                  ranks[0]["to plain"], ranks[0]["to layers"], 1 + plan.overhead)
        held = held and fullest <= limit and is_same
    for budget, refusal in refused.items():
        print(f"{name}, {wrapper}, {budget}: {refusal.budget_bytes:,} bytes cannot be met; the "
              f"least is {refusal.minimum_bytes:,}")
    layers = seen[0][LAYERS]
    print(f"{name}, {wrapper}, every layer checkpointed: "
          f"{max(each[LAYERS]['peak'] for each in seen) / MEGABYTE:.3f} MB, "
          f"{layers['to plain']} of the plain time, "
          f"{layers['collectives']} collectives")
    return held


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 if a budget is broken or collectives differ."""
    parser = benchmark_parser("planned_ranks", __doc__, models=("gpt2", "bert", "llama", "vit"),
                              known=STEPS)
    add_names(parser, "--wrapper", WRAPPERS, ("ddp", "zero1", "fsdp2", "fsdp2, kept"),
              separator=";")
    parser.add_argument("--budget", default="80%,60%,40%,least,layers")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--regions", nargs="+", help="modules that are compiled one by one; as "
                        "for planner.plan if it is not given")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=20.0)
    arguments = parse(parser, argv)
    torch.set_num_threads(1)
    table = Table("model:6", "wrapper:12", "budget:6", "MB:8.3f", "predicted:9.3f",
                  "measured:9.3f", "off %:6.2f", "plain:9.3f", "gradients:9.1e", "collectives:11d",
                  "as plain", "time:19", "to layers:19", "planned:7.2f")
    held = [compare(name, wrapper, arguments, table)
            for name in arguments.model for wrapper in arguments.wrapper]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
