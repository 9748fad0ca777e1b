"""Predicted against measured memory of one rank: real runs of two ranks with gloo on this machine.

    python -m benchmarks.data_parallel --model gpt2,bert,resnet --optimizer adamw

Each run is two processes that train for three steps; the third is measured on each rank, and the
larger peak counts.  The peak is what the allocator hands out during that step, from the forward to
the end of the optimizer's step, above what is there when it begins; what is there is added up from
the storages of parameters, buffers, inputs and optimizer state, and from what making the wrapper
has allocated (DDP's buckets).
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
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
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import planner
from benchmarks.arguments import add_names, benchmark_parser, parse
from benchmarks.measure import MEGABYTE, held_by_loss, storage_bytes
from benchmarks.models import WORKLOADS, Workload
from benchmarks.settled_collectives import settle_collectives
from benchmarks.table import Table
from graph_capture.memory.allocator import record_peak
from graph_capture.plain_step.loss import objective
from planner.step.rank_layout import unit_names

RANKS = 2
TOLERANCE = 0.03
"""The most that a predicted peak may be off."""
OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

CASES: dict[str, planner.DataParallel] = {
    "ddp": planner.DataParallel("ddp", RANKS),
    "ddp, bucket views": planner.DataParallel("ddp", RANKS, gradient_as_bucket_view=True),
    **{kind: planner.DataParallel(kind, RANKS) for kind in ("zero1", "zero2", "zero3", "fsdp2")},
}

SMALL_STEPS: dict[str, Callable[[], Workload]] = {
    **{name: partial(WORKLOADS[name], batch=1, sequence=64) for name in ("gpt2", "bert", "llama")},
    **{name: partial(WORKLOADS[name], batch=1, image=32) for name in ("vit", "unet")},
    "resnet": partial(WORKLOADS["resnet"], batch=1),
}
"""Steps in which parameters, gradients and their buffers outweigh the activations: elsewhere the
wrapper would not show."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One rank's third step."""

    peak_bytes: int
    resident_bytes: int


def wrap(model: nn.Module, parallel: planner.DataParallel) -> Callable[..., Any]:
    """The model as its rank calls it."""
    if parallel.kind in ("ddp", "zero1"):
        # All ranks make the same model; sending it around would leave traces in the measurement.
        return DistributedDataParallel(
            model, gradient_as_bucket_view=parallel.gradient_as_bucket_view, init_sync=False)
    mesh = init_device_mesh("cpu", (parallel.ranks,))
    reshard = {"zero2": False, "zero3": True}.get(parallel.kind, parallel.reshard_after_forward)
    units = [model.get_submodule(name) for name in
             sorted(unit_names(model, parallel.units), key=len, reverse=True)]
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        settle_collectives(unit)
    return model


def make_optimizer(model: nn.Module, name: str, parallel: planner.DataParallel) -> Optimizer:
    """The optimizer of one rank."""
    if parallel.kind == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), OPTIMIZERS[name], lr=1e-3)
    return OPTIMIZERS[name](model.parameters(), lr=1e-3)


def measure_step(workload: Workload, parallel: planner.DataParallel, optimizer: str,
                 wrapped: list[Callable[..., Any]] | None = None) -> Measured:
    """Three steps on this rank of the process group; the third is measured, and its gradients stay.

    The wrapped model is put into the list `wrapped`.
    """
    made: list[Callable[..., Any]] = [] if wrapped is None else wrapped
    buckets = 0
    if parallel.kind in ("ddp", "zero1"):
        buckets = record_peak(lambda: made.append(wrap(workload.model, parallel)), "cpu").end_bytes
    else:
        made.append(wrap(workload.model, parallel))
    model = made[0]
    stepper = make_optimizer(workload.model, optimizer, parallel)

    def step() -> None:
        output = workload.call(model)
        objective(output, workload.loss_fn).backward()
        stepper.step()

    for _ in range(2):
        step()
        stepper.zero_grad(set_to_none=True)
    resident = buckets + storage_bytes([
        *workload.model.parameters(), *workload.model.buffers(),
        *pytree.tree_leaves(workload.inputs), *held_by_loss(workload)]) + storage_bytes(
        pytree.tree_leaves(_state_of(stepper)))
    return Measured(resident + record_peak(step, "cpu").peak_bytes, resident)


def _state_of(optimizer: Optimizer) -> list[object]:
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return [value for state in inner.state.values() for value in state.values()]


def _rank(rank: int, port: int, name: str, case: str, optimizer: str, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        found = measure_step(SMALL_STEPS[name](), CASES[case], optimizer)
        Path(folder, str(rank)).write_text(f"{found.peak_bytes} {found.resident_bytes}")
    finally:
        dist.destroy_process_group()


def measure(name: str, case: str, optimizer: str) -> Measured:
    """The rank that takes the most in a real run."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        spawn(_rank, (port, name, case, optimizer, folder), nprocs=RANKS)
        found = [Measured(*map(int, Path(folder, str(rank)).read_text().split()))
                 for rank in range(RANKS)]
    return max(found, key=lambda measured: measured.peak_bytes)


def compare(name: str, case: str, optimizer: str, table: Table) -> bool:
    """Print one row; whether the peak is predicted well enough."""
    workload = SMALL_STEPS[name]()
    predicted = planner.data_parallel(
        workload.model, workload.inputs, parallel=CASES[case], loss_fn=workload.loss_fn,
        optimizer=OPTIMIZERS[optimizer])
    found = measure(name, case, optimizer)
    cells: list[float] = []
    for ours, theirs in ((predicted.resident_bytes, found.resident_bytes),
                         (predicted.peak_bytes, found.peak_bytes)):
        cells += [ours / MEGABYTE, theirs / MEGABYTE, 100 * (ours / theirs - 1)]
    table.row(name, case, optimizer, *cells)
    return abs(predicted.peak_bytes / found.peak_bytes - 1) <= TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where a prediction is further off than `TOLERANCE`."""
    parser = benchmark_parser("data_parallel", __doc__, models=("gpt2", "bert", "vit", "resnet"),
                              known=SMALL_STEPS)
    add_names(parser, "--case", CASES, separator=";")
    add_names(parser, "--optimizer", OPTIMIZERS, ("adamw",))
    arguments = parse(parser, argv)
    torch.set_num_threads(1)
    figures = ("measured:9.3f", "off %:6.2f")
    table = Table("model:6", "wrapper:18", "optimizer", "resident MB:.3f", *figures, "peak MB:9.3f",
                  *figures)
    ok = [compare(name, case, optimizer, table) for name in arguments.model
          for optimizer in arguments.optimizer for case in arguments.case]
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
