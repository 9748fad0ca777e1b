"""CPU seconds of planning and applying, by the number of ranks: real ranks with gloo.

    python -m benchmarks.ranks_cost --model gpt2 --ranks 1,2,4

Each rank trains a model in `DistributedDataParallel` as it is, and another one under
`planner.within`.  What the planned one's first two steps (in which it is planned, and planned again
with what was seen) take beyond two later ones counts as planning and applying: CPU seconds of the
rank's process, so that ranks that share a core do not count each other's work.  A row has the rank
that takes the most, the median of all ranks, and the seconds of the run as it is; the
length of the plan is what one rank sends to the others.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.arguments import benchmark_parser, parse
from benchmarks.planned_ranks import STEPS
from benchmarks.table import Table
from graph_capture.plain_step.loss import objective
from planner.plans.file import dumps

_WARMING_STEPS = 2


def added_seconds(name: str, budget: str | None, time_limit: float) -> tuple[float, int]:
    """What the first steps take beyond as many later ones, in CPU seconds of this process, and the
    length of the plan."""
    workload = STEPS[name]()
    model = DistributedDataParallel(workload.model)
    if budget is not None:
        planner.within(model, budget, time_limit=time_limit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds = []
    for _ in range(2 * _WARMING_STEPS):
        began = time.process_time()
        objective(workload.call(model), workload.loss_fn).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    length = 0 if budget is None else len(dumps(planner.plan_of(model)))
    return sum(seconds[:_WARMING_STEPS]) - sum(seconds[_WARMING_STEPS:]), length


def _rank(rank: int, port: int, ranks: int, name: str, budget: str, time_limit: float,
          folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        plain, _ = added_seconds(name, None, time_limit)
        planned, length = added_seconds(name, budget, time_limit)
        Path(folder, str(rank)).write_text(f"{plain} {planned} {length}")
    finally:
        dist.destroy_process_group()


def measure(name: str, ranks: int, budget: str, time_limit: float
            ) -> tuple[list[float], list[float], int]:
    """Of each rank: the seconds of the plain run and of the planned one; the plan's length."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        spawn(_rank, (port, ranks, name, budget, time_limit, folder), nprocs=ranks)
        found = [Path(folder, str(rank)).read_text().split() for rank in range(ranks)]
    return ([float(plain) for plain, _, _ in found], [float(planned) for _, planned, _ in found],
            int(found[0][2]))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = benchmark_parser("ranks_cost", __doc__, models=("gpt2",), known=STEPS)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=10.0)
    arguments = parse(parser, argv)
    torch.set_num_threads(1)
    table = Table("model:6", "ranks:5d", "round:5d", "most:6.2f", "median:6.2f", "all ranks:9.2f",
                  "plain:6.2f", "plan kB:7.1f")
    for name in arguments.model:
        for turn in range(arguments.rounds):
            for ranks in map(int, arguments.ranks.split(",")):
                plain, planned, length = measure(name, ranks, arguments.budget,
                                                 arguments.time_limit)
                table.row(name, ranks, turn + 1, max(planned), statistics.median(planned),
                          sum(planned), statistics.median(plain), length / 1000)
    return 0


if __name__ == "__main__":
    sys.exit(main())
