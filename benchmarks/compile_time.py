"""Time to compile the applied model, for the whole model and by blocks, as it gets deeper.

    python -m benchmarks.compile_time --layers 6,12,24 --budgets none,70
    python -m benchmarks.compile_time --backend inductor --regions blocks --layers 6,24

Seconds of CPU, those of the C++ compiler included, of the first step of the applied model less
those of the second; one thread.  By blocks, code is compiled once for each different decision;
"decisions" counts them.  Each line is measured in a process of its own that finds no compiled code
on disk.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import torch

from apply.blocks import count_decisions
from benchmarks.arguments import add_names, benchmark_parser, parse
from benchmarks.models import gpt2
from benchmarks.table import Table
from planner.arguments.planning import BACKENDS
from planner.search.effort import Effort
from planner.search.planning import plan_within


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = benchmark_parser("compile_time", __doc__, time_limit=20.0)
    parser.add_argument("--backend", default="eager", choices=BACKENDS)
    add_names(parser, "--regions", ("model", "blocks"))
    parser.add_argument("--layers", default="6,12,24")
    parser.add_argument("--budgets", default="none,70", help="percentages of the plain peak")
    options = parse(parser, arguments)
    table = Table("backend:8", "regions", "budget:>6", "layers:d", "decisions:d", "capture s:.1f",
                  "plan s:7.1f", "compile s:.1f")
    for regions in options.regions:
        for budget in options.budgets.split(","):
            for layers in map(int, options.layers.split(",")):
                line = multiprocessing.get_context("spawn").Process(
                    target=measure,
                    args=(options.backend, regions, budget, layers, options.time_limit, table))
                line.start()
                line.join()
                if line.exitcode:
                    return line.exitcode
    return 0


def measure(backend: str, regions: str, budget: str, layers: int, time_limit: float, table: Table
            ) -> None:
    """Print one line."""
    torch.set_num_threads(1)
    with no_code_on_disk():
        if backend == "inductor":  # What each process compiles once: Inductor's own headers.
            torch.compile(lambda x: x.sin().sum())(torch.ones(64, requires_grad=True)).backward()
        table.row(backend, regions, budget, layers,
                  *_measured(backend, regions, budget, layers, time_limit))


def _measured(backend: str, regions: str, budget: str, layers: int, time_limit: float
              ) -> tuple[int, float, float, float]:
    """Different decisions; seconds of capture, of planning and of compiling."""
    workload = gpt2(layers=layers, batch=4, sequence=64, width=128, heads=4, vocabulary=512)
    times = [cpu_seconds()]
    prepared = workload.prepare(regions=regions, backend=backend)
    times.append(cpu_seconds())
    limit = None if budget == "none" else int(prepared.baseline_peak_bytes * int(budget) / 100)
    plan = plan_within(prepared, limit, Effort(time_limit=time_limit))
    times.append(cpu_seconds())
    applied = plan.apply(workload.model)
    for _ in range(2):
        workload.call(applied).loss.backward()
        times.append(cpu_seconds())
    captured, planned, first, second = (
        end - begin for begin, end in pairwise(times))
    return count_decisions(plan.recipe), captured, planned, first - second


@contextmanager
def no_code_on_disk() -> Iterator[None]:
    """Inside, Inductor finds nothing that it has compiled before."""
    with tempfile.TemporaryDirectory() as empty, patch.dict(
            os.environ, TORCHINDUCTOR_CACHE_DIR=empty):
        yield


def cpu_seconds() -> float:
    """What this process, and those that it has waited for, have used."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(
        resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


if __name__ == "__main__":
    sys.exit(main())
