"""Functions that run on several ranks of a process group with gloo, each a process."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.optim import Optimizer

from planner._graph_capture.memory.allocator import record_stages

TIME_OUT = datetime.timedelta(seconds=120)


def on_ranks(function: Callable[..., None], *arguments: Any, ranks: int = 2,
             time_out: datetime.timedelta = TIME_OUT) -> None:
    """Call `function(rank, *arguments)` on each rank; an error on a rank is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run, (function, arguments, ranks, time_out, folder), nprocs=ranks)


def train_language_model(net: nn.Module, optimizer: Optimizer, vocabulary: int,
                         batches: Sequence[tuple[int, int]]) -> tuple[list[float], list[int]]:
    """Losses, and peaks above what was there, of steps on random tokens of these sizes."""
    losses = []

    def step(batch: tuple[int, int]) -> None:
        ids = torch.randint(vocabulary, batch)
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    records = record_stages([lambda batch=batch: step(batch) for batch in batches])
    return losses, [record.peak_bytes for record in records]


def _run(rank: int, function: Callable[..., None], arguments: tuple[Any, ...], ranks: int,
         time_out: datetime.timedelta, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    store.set_timeout(time_out)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=time_out)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
