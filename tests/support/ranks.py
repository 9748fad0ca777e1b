"""Functions that run on several ranks of a process group with gloo, each a process."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tests.support.stages import record_stages

TIME_OUT = datetime.timedelta(seconds=120)
_processes: dict[str, list[ProcessPoolExecutor]] = {}
"""One for each rank, of the last test file: each takes long to import what the tests need."""


def on_ranks(function: Callable[..., None], *arguments: Any, ranks: int = 2,
             time_out: datetime.timedelta = TIME_OUT) -> None:
    """Call `function(rank, *arguments)` on each rank; an error on a rank is raised here."""
    if len(_processes.get(function.__module__, ())) != ranks:
        _end_processes()
        context = multiprocessing.get_context("spawn")
        _processes[function.__module__] = [ProcessPoolExecutor(1, context) for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        calls = [process.submit(_run, rank, function, arguments, ranks, time_out, folder)
                 for rank, process in enumerate(_processes[function.__module__])]
        for call in wait(calls, return_when=FIRST_EXCEPTION).done:
            if (error := call.exception()) is not None:
                _end_processes()  # another rank may wait for this one
                raise error


def _end_processes() -> None:
    for executors in _processes.values():
        for executor in executors:
            for process in executor._processes.values():
                process.kill()
            executor.shutdown()
    _processes.clear()


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
    torch._dynamo.reset()
    try:
        function(rank, *arguments)
    except BaseException:  # its own class may not be pickled
        raise RuntimeError(f"rank {rank}: {traceback.format_exc()}") from None
    finally:
        dist.destroy_process_group()
