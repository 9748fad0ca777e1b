"""Plans for Inductor as models get deeper: the whole model against its blocks.

    python -m benchmarks.depth --models llama,gpt2 --layers 12,24 --budgets 80,60,40,30
    python -m benchmarks.depth --models llama --layers 48 --regions model --budgets 60
    python -m benchmarks.depth --models llama --layers 12 --budgets 40 --measure

Batch 4 x 512 tokens, 256 wide, or 4 images of 128 x 128, one thread.  Seconds are of CPU, including
child processes.  The row of torch.compile is the time by which its first step exceeds the second,
if it finds no code on disk.  All budgets of a model share its capture.  "measured": the allocator's
peak in the second step of the applied model, as a fraction of the predicted one; only with
`--measure`.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from unittest.mock import patch

import torch

from benchmarks.arguments import add_names, benchmark_parser, parse
from benchmarks.models import Workload, bert, gpt2, llama
from benchmarks.table import Table
from planner._graph_capture.memory.allocator import record_peak
from planner.errors import InfeasibleBudget
from planner.plans.plan import Plan
from planner.search.planning import plan_within
from planner.search.variants import Effort


def convnext(*, layers: int, batch: int, sequence: int) -> Workload:
    """ConvNeXt with all but four layers in its second stage, on squares of `sequence` / 4 pixels.
    """
    from transformers import ConvNextConfig, ConvNextForImageClassification

    side = sequence // 4
    torch.manual_seed(0)
    model = ConvNextForImageClassification(ConvNextConfig(
        image_size=side, num_stages=3, hidden_sizes=[48, 96, 192], depths=[2, layers - 4, 2],
        num_labels=10))
    return Workload("convnext", model.train(), {"pixel_values": torch.randn(batch, 3, side, side),
                                                "labels": torch.arange(batch) % 10})


MODELS: Mapping[str, Callable[..., Workload]] = MappingProxyType({
    "llama": llama, "gpt2": gpt2, "bert": bert, "convnext": convnext})


_ITSELF = "torch.compile"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = benchmark_parser("depth", __doc__, time_limit=60.0)
    add_names(parser, "--models", tuple(MODELS))
    add_names(parser, "--regions", ("model", "blocks", _ITSELF), ("model", "blocks"))
    parser.add_argument("--layers", default="12,24")
    parser.add_argument("--budgets", default="80,60,40,30", help="percentages of the plain peak")
    parser.add_argument("--measure", action="store_true", help="run the applied model")
    options = parse(parser, arguments)
    table = Table("model:12", "layers:d", "regions:13", "budget:>6", "extra:7.3%", "bound:7.3%",
                  "capture s:.1f", "plan s:6.1f", "clock s:6.1f", "of budget:.4f", "measured:>9",
                  "notes:20")
    for name in options.models:
        for layers in map(int, options.layers.split(",")):
            for regions in options.regions:
                lines = multiprocessing.get_context("spawn").Process(
                    target=measure, args=(name, layers, regions, options.budgets.split(","),
                                          options.time_limit, options.measure, table))
                lines.start()
                lines.join()
                if lines.exitcode:
                    return lines.exitcode
    return 0


def measure(name: str, layers: int, regions: str, budgets: Sequence[str], time_limit: float,
            runs: bool, table: Table) -> None:
    """Print the lines of one model."""
    torch.set_num_threads(1)
    torch.compile(lambda x: x.sin().sum())(torch.ones(64, requires_grad=True)).backward()
    workload = MODELS[name](layers=layers, batch=4, sequence=512)
    if regions == _ITSELF:
        cpu, clock = _compiling_seconds(workload)
        table.row(name, layers, regions, *[None] * 4, cpu, clock, *[None] * 3)
        return
    begun = cpu_seconds()
    prepared = workload.prepare(regions=regions, backend="inductor")
    captured = cpu_seconds() - begun
    for budget in budgets:
        limit = int(prepared.baseline_peak_bytes * int(budget) / 100)
        begun, clock = cpu_seconds(), time.monotonic()
        try:
            plan = plan_within(prepared, limit, Effort(time_limit=time_limit))
        except InfeasibleBudget as refusal:
            print(f"{name}, {layers} layers, {regions}, {budget}%: "
                  f"{refusal.minimum_bytes / limit:.2f} of that is needed")
            continue
        planned, clock = cpu_seconds() - begun, time.monotonic() - clock
        measured = ""
        if runs:
            measured = f"{_peak_bytes(workload, plan) / plan.peak_bytes:.4f}"
        said = [word for word in ("cut", "estimate") if any(word in n for n in plan.notes)]
        table.row(name, layers, regions, budget, plan.overhead, plan.overhead_bound, captured,
                  planned, clock, plan.peak_bytes / limit, measured,
                  ", ".join([plan.status, *said]))


def _compiling_seconds(workload: Workload) -> tuple[float, float]:
    """Return the seconds, of CPU and by the clock, that the first step of `torch.compile(model)`
    lasts longer than the second."""
    compiled, spent = torch.compile(workload.model), []
    with no_code_on_disk():
        for _ in range(2):
            cpu, clock = cpu_seconds(), time.monotonic()
            workload.call(compiled).loss.backward()
            spent.append((cpu_seconds() - cpu, time.monotonic() - clock))
    (first, first_clock), (second, second_clock) = spent
    return first - second, first_clock - second_clock


@contextmanager
def no_code_on_disk() -> Iterator[None]:
    """Context in which Inductor finds no code compiled before."""
    with tempfile.TemporaryDirectory() as empty, patch.dict(
            os.environ, TORCHINDUCTOR_CACHE_DIR=empty):
        yield


def cpu_seconds() -> float:
    """Return seconds of CPU of this process and of those that it has waited for."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(
        resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def _peak_bytes(workload: Workload, plan: Plan) -> int:
    """Return the allocator's peak in the second step of the applied model, with resident memory."""
    applied = plan.apply(workload.model)

    def step() -> None:
        output = workload.call(applied)  # alive to the end of the step, as in a training loop
        output.loss.backward()

    step()
    workload.model.zero_grad()
    return record_peak(step, "cpu").peak_bytes + plan.resident_bytes


if __name__ == "__main__":
    sys.exit(main())
