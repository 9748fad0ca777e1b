"""Plans of one rank against real ranks with gloo on this machine.

    python -m benchmarks.planned_ranks --model gpt2,bert --budget "80%,60%,40%,least"

Each row is one run of several processes.  Each process trains the model in its wrapper as it is,
and then with the plan applied before it is wrapped, from the same seeds; the third step is
measured, and the largest peak of any rank counts.  `gradients` is the distance of the gradients
(their shards) of that step from those without a plan; `collectives` are those of one step, by the
profiler, and `as plain` says whether there are as many of each kind, of as many elements in all.
`time` is that of the planned step, in parts of the plain one, by the median of the steps after the
third; `planned` is what the plan estimates.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

import planner
from benchmarks.arguments import add_names, benchmark_parser, parse
from benchmarks.data_parallel import make_optimizer, measure_step
from benchmarks.measure import MEGABYTE
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import Table
from graph_capture.plain_step.loss import objective

STEPS: dict[str, Callable[[], Workload]] = {
    **{name: partial(WORKLOADS[name], batch=4, sequence=128)
       for name in ("gpt2", "bert", "llama")},
    "vit": partial(WORKLOADS["vit"], batch=4),
}
WRAPPERS: dict[str, Mapping[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "ddp, bucket views": {"kind": "ddp", "gradient_as_bucket_view": True},
    "zero1": {"kind": "zero1"},
    "fsdp2": {"kind": "fsdp2"},
    "fsdp2, kept": {"kind": "fsdp2", "reshard_after_forward": False},
}
TIMED_STEPS = 5
_COLLECTIVES = ("gloo:", "nccl:")


def plan_for(workload: Workload, parallel: planner.DataParallel, budget: str, time_limit: float
             ) -> planner.Plan:
    """The plan of one rank; `least`: for the smallest budget that can be met."""
    def make(limit: int | str) -> planner.Plan:
        return planner.plan(workload.model, workload.inputs, budget=limit, parallel=parallel,
                            loss_fn=workload.loss_fn, optimizer="adamw", time_limit=time_limit)

    if budget != "least":
        return make(budget)
    try:
        return make(1)
    except planner.InfeasibleBudget as refusal:
        return make(refusal.minimum_bytes)


def train_here(make: Callable[[], Workload], parallel: planner.DataParallel,
               plan: planner.Plan | None) -> dict[str, Any]:
    """What this rank takes in the third step, and its gradients then."""
    workload = make()
    if plan is not None:
        workload = Workload(workload.name, plan.apply(workload.model), workload.inputs,
                            workload.loss_fn)
    settled: list[Callable[..., Any]] = []
    measured = measure_step(workload, parallel, "adamw", settled)
    gradients = torch.cat([_local(p.grad).flatten() for p in workload.model.parameters()
                           if p.grad is not None])
    stepper, model = make_optimizer(workload.model, "adamw", parallel), settled[0]

    def step() -> None:
        stepper.zero_grad(set_to_none=True)
        objective(workload.call(model), workload.loss_fn).backward()

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        step()
    collectives: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for event in seen.events():
        if event.name.startswith(_COLLECTIVES):
            collectives[event.name] += 1
            elements[event.name] += sum(math.prod(shape) for shape in event.input_shapes)
    seconds = []
    for _ in range(TIMED_STEPS):
        dist.barrier()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return {"peak": measured.peak_bytes, "gradients": gradients,
            "collectives": (collectives, elements), "seconds": statistics.median(seconds)}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _rank(rank: int, port: int, ranks: int, name: str, wrapper: str, plan_path: str, folder: str
          ) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    parallel = planner.DataParallel(ranks=ranks, **WRAPPERS[wrapper])
    try:
        plain = train_here(STEPS[name], parallel, None)
        gc.collect()
        planned = train_here(STEPS[name], parallel, planner.load(plan_path))
        off = (planned["gradients"] - plain["gradients"]).norm() / plain["gradients"].norm()
        Path(folder, str(rank)).write_text(json.dumps({
            "plain": plain["peak"], "planned": planned["peak"], "off": off.item(),
            "collectives": sum(planned["collectives"][0].values()),
            "same": planned["collectives"] == plain["collectives"],
            "time": planned["seconds"] / plain["seconds"]}))
    finally:
        dist.destroy_process_group()


def run(name: str, wrapper: str, ranks: int, plan: planner.Plan) -> list[dict[str, Any]]:
    """What each rank saw."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        path = Path(folder, "plan.json")
        plan.save(path)
        spawn(_rank, (port, ranks, name, wrapper, str(path), folder), nprocs=ranks)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def compare(name: str, wrapper: str, budget: str, arguments: argparse.Namespace, table: Table
            ) -> bool:
    """Print one row; whether the budget holds and all is as without a plan."""
    parallel = planner.DataParallel(ranks=arguments.ranks, **WRAPPERS[wrapper])
    plan = plan_for(STEPS[name](), parallel, budget, arguments.time_limit)
    seen = run(name, wrapper, arguments.ranks, plan)
    fullest = max(each["planned"] for each in seen)
    limit = plan.budget_bytes or plan.baseline_peak_bytes
    is_same = all(each["same"] for each in seen)
    table.row(name, wrapper, budget, limit / MEGABYTE, plan.peak_bytes / MEGABYTE,
              fullest / MEGABYTE, 100 * (plan.peak_bytes / fullest - 1),
              max(each["plain"] for each in seen) / MEGABYTE,
              max(each["off"] for each in seen), seen[0]["collectives"], str(is_same),
              seen[0]["time"], 1 + plan.overhead)
    return fullest <= limit and is_same


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where a budget is broken or collectives differ."""
    parser = benchmark_parser("planned_ranks", __doc__, models=("gpt2", "bert", "llama", "vit"),
                              known=STEPS)
    add_names(parser, "--wrapper", WRAPPERS, ("ddp", "zero1", "fsdp2", "fsdp2, kept"),
              separator=";")
    parser.add_argument("--budget", default="80%,60%,40%,least")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=20.0)
    arguments = parse(parser, argv)
    torch.set_num_threads(1)
    table = Table("model:6", "wrapper:12", "budget:6", "MB:8.3f", "predicted:9.3f",
                  "measured:9.3f", "off %:6.2f", "plain:9.3f", "gradients:9.1e", "collectives:11d",
                  "as plain", "time:5.2f", "planned:7.2f")
    held = []
    for name in arguments.model:
        for wrapper in arguments.wrapper:
            for budget in arguments.budget.split(","):
                try:
                    held.append(compare(name, wrapper, budget, arguments, table))
                except planner.InfeasibleBudget as refusal:
                    print(f"{name}, {wrapper}, {budget}: {refusal.budget_bytes:,} bytes cannot be "
                          f"met; the least is {refusal.minimum_bytes:,}")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
