"""Functions that run on several ranks of a process group with gloo, each a process."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

TIME_OUT = datetime.timedelta(seconds=120)


def on_ranks(function: Callable[..., None], *arguments: Any, ranks: int = 2,
             time_out: datetime.timedelta = TIME_OUT) -> None:
    """Call `function(rank, *arguments)` on each rank; an error on a rank is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run, (function, arguments, ranks, time_out, folder), nprocs=ranks)


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
