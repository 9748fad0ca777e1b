"""Predicted against measured memory of one rank: real runs of two ranks with gloo on this machine.

    python -m benchmarks.data_parallel --model gpt2,bert,resnet --optimizer adamw

Each run is two processes that train for three steps; the third is measured on each rank, and the
larger peak counts.  The peak is what the allocator hands out during that step, from the forward to
the end of the optimizer's step, above what is there when it begins; what is there is added up from
the storages of parameters, buffers, inputs and optimizer state, and from what making the wrapper
has allocated (DDP's buckets).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import planner
from benchmarks.measure import MEGABYTE
from benchmarks.models import WORKLOADS, Workload
from graph_capture.allocator import record_peak
from graph_capture.loss import objective
from planner.rank_layout import unit_names

RANKS = 2
TOLERANCE = 0.03
"""The most that a predicted peak may be off."""
OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

CASES: dict[str, planner.DataParallel] = {
    "ddp": planner.DataParallel("ddp", RANKS),
    "ddp, bucket views": planner.DataParallel("ddp", RANKS, gradient_as_bucket_view=True),
    "zero1": planner.DataParallel("zero1", RANKS),
    "zero2": planner.DataParallel("zero2", RANKS),
    "zero3": planner.DataParallel("zero3", RANKS),
    "fsdp2": planner.DataParallel("fsdp2", RANKS),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One rank's third step."""

    peak_bytes: int
    resident_bytes: int


def wrap(model: nn.Module, parallel: planner.DataParallel) -> Callable[..., Any]:
    """The model as its rank calls it."""
    if parallel.kind in ("ddp", "zero1"):
        return DistributedDataParallel(
            model, gradient_as_bucket_view=parallel.gradient_as_bucket_view)
    mesh = init_device_mesh("cpu", (RANKS,))
    reshard = {"zero2": False, "zero3": True}.get(parallel.kind, parallel.reshard_after_forward)
    names = unit_names(model, parallel.units)
    for name in sorted(names, key=len, reverse=True):
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def make_optimizer(model: nn.Module, name: str, parallel: planner.DataParallel) -> Optimizer:
    """The optimizer of one rank."""
    if parallel.kind == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), OPTIMIZERS[name], lr=1e-3)
    return OPTIMIZERS[name](model.parameters(), lr=1e-3)


def held_bytes(tensors: Iterable[object]) -> int:
    """Bytes of the storages of these tensors, those of a sharded one on this rank."""
    local = [t._local_tensor if isinstance(t, DTensor) else t
             for t in tensors if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def measure_here(workload: Workload, parallel: planner.DataParallel, optimizer: str) -> Measured:
    """Three steps on this rank of the process group; the third is measured."""
    made: list[Callable[..., Any]] = []
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
    resident = buckets + held_bytes([
        *workload.model.parameters(), *workload.model.buffers(),
        *pytree.tree_leaves(workload.inputs), *_labels(workload)]) + held_bytes(
        pytree.tree_leaves(_state_of(stepper)))
    peak = record_peak(step, "cpu").peak_bytes
    return Measured(resident + peak, resident)


def _state_of(optimizer: Optimizer) -> list[object]:
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return [value for state in inner.state.values() for value in state.values()]


def _labels(workload: Workload) -> list[object]:
    """Tensors that the loss holds; the account counts them among the buffers."""
    closure = getattr(workload.loss_fn, "__closure__", None) or ()
    return [cell.cell_contents for cell in closure]


def _rank(rank: int, port: int, name: str, case: str, optimizer: str, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        found = measure_here(WORKLOADS[name](), CASES[case], optimizer)
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


HEADER = (f"| {'model':<6} | {'wrapper':<18} | {'optimizer':<9} | {'resident MB':>11} | "
          f"{'measured':>8} | {'off %':>6} | {'peak MB':>9} | {'measured':>9} | {'off %':>6} |\n"
          f"|{'-' * 8}|{'-' * 20}|{'-' * 11}|{'-' * 12}:|{'-' * 9}:|{'-' * 7}:|{'-' * 10}:|"
          f"{'-' * 10}:|{'-' * 7}:|")


def compare(name: str, case: str, optimizer: str) -> bool:
    """Print one row; whether the peak is predicted well enough."""
    workload = WORKLOADS[name]()
    predicted = planner.data_parallel(
        workload.model, workload.inputs, parallel=CASES[case], loss_fn=workload.loss_fn,
        optimizer=OPTIMIZERS[optimizer])
    found = measure(name, case, optimizer)
    off = predicted.peak_bytes / found.peak_bytes - 1
    print(f"| {name:<6} | {case:<18} | {optimizer:<9} | "
          f"{predicted.resident_bytes / MEGABYTE:>11.3f} | {found.resident_bytes / MEGABYTE:>8.3f} "
          f"| {100 * (predicted.resident_bytes / found.resident_bytes - 1):>6.2f} | "
          f"{predicted.peak_bytes / MEGABYTE:>9.3f} | {found.peak_bytes / MEGABYTE:>9.3f} | "
          f"{100 * off:>6.2f} |", flush=True)
    return abs(off) <= TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where a prediction is further off than `TOLERANCE`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_parallel",
                                     description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gpt2,bert,resnet", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--case", default=";".join(CASES),
                        help=f"separated by semicolons, of: {'; '.join(CASES)}")
    parser.add_argument("--optimizer", default="adamw", help=f"of {', '.join(OPTIMIZERS)}")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    names, cases = arguments.model.split(","), arguments.case.split(";")
    optimizers = arguments.optimizer.split(",")
    for given, known in ((names, WORKLOADS), (cases, CASES), (optimizers, OPTIMIZERS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"expected any of {', '.join(known)}; got {', '.join(unknown)}")
    print(HEADER, flush=True)
    ok = [compare(name, case, optimizer) for name in names for optimizer in optimizers
          for case in cases]
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
