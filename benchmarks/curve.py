"""Memory against time, measured: plans, gradient checkpointing and `activation_memory_budget`.

    python -m benchmarks.curve --model gpt2 --rounds 9 --allow recompute,chunk --draw FILE.svg

There are two executors, and each is compared with itself.  Op by op: the plain step, Hugging Face's
gradient checkpointing of every layer, and plans.  Compiled by Inductor: `torch.compile(model)` with
several values of `torch._functorch.config.activation_memory_budget`, and plans.  All steps of one
executor run in turns in one process; a step's time is the median of its ratios to the step of that
executor without memory savings.  Peaks are allocator events above resident memory.  The models
return only their loss.  With `--allow recompute,chunk`, plans that may run parts in chunks are
another series of the steps that run op by op.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

import planner
from benchmarks.arguments import add_names, benchmark_parser, parse
from benchmarks.compiled import compiled
from benchmarks.measure import (
    MEGABYTE,
    Ratio,
    peak_bytes,
    time_steps,
    with_gradient_checkpointing,
)
from benchmarks.models import WORKLOADS, Workload, returning_loss_only
from benchmarks.table import Table
from planner.reporters.figures import new_figure

RATIOS = (0.7, 0.5, 0.4, 0.2)
"""Values of `activation_memory_budget`; 1 is the default, and saves no memory."""
PLANS = "plans"
CHUNKED = "plans, parts in chunks"


class Point(NamedTuple):
    """One step, measured."""

    series: str
    label: str
    peak_bytes: int
    time: Ratio
    """Time as a multiple of the first step's."""


def measure(workload: Workload, steps: Iterable[tuple[str, str, nn.Module]],
            rounds: int) -> list[Point]:
    """Measure peaks and times of steps given as series, label and model; the first is the
    reference."""
    named = [(series, label, model, peak_bytes(workload, model)) for series, label, model in steps]
    times = time_steps(workload, [model for _, _, model, _ in named], rounds)
    return [Point(series, label, peak, times.ratio(index, 0))
            for index, (series, label, _, peak) in enumerate(named)]


def planned(workload: Workload, backend: str, points: int, time_limit: float,
            chunked: bool = False) -> Iterable[tuple[str, str, nn.Module]]:
    """Yield applied plans, from the least memory to the least time."""
    curve = planner.frontier(
        workload.model, workload.inputs, loss_fn=workload.loss_fn, backend=backend, points=points,
        allow="chunk" if chunked else ("recompute",), time_limit=time_limit)
    for plan in curve:
        yield (CHUNKED if chunked else PLANS, f"estimated {plan.overhead:+.1%}",
               plan.apply(workload.model))


def op_by_op(name: str, points: int, rounds: int, time_limit: float,
             chunked: bool) -> list[Point]:
    """Measure the plain step, gradient checkpointing and plans for the eager backend, and on
    request those that may run parts in chunks."""
    workload = WORKLOADS[name]()
    checkpointed = with_gradient_checkpointing(workload)
    assert checkpointed is not None, f"{name} has no gradient checkpointing"
    workload = returning_loss_only(workload)
    theirs = returning_loss_only(Workload(name, checkpointed, workload.inputs)).model
    return measure(workload, [
        ("plain PyTorch", "", workload.model), ("gradient_checkpointing_enable()", "", theirs),
        *planned(workload, "eager", points, time_limit),
        *(planned(workload, "eager", points, time_limit, chunked=True) if chunked else ())],
                   rounds)


def by_inductor(name: str, points: int, rounds: int, time_limit: float) -> list[Point]:
    """Measure `torch.compile` at several ratios, and plans for Inductor."""
    workload = returning_loss_only(WORKLOADS[name]())
    return measure(workload, [
        ("torch.compile(model)", "", compiled(workload.model)),
        *(("activation_memory_budget", f"{ratio:g}", compiled(workload.model, ratio))
          for ratio in RATIOS), *planned(workload, "inductor", points, time_limit)], rounds)


def draw(panels: Mapping[str, Sequence[Point]], path: str) -> None:
    """Draw one panel for each executor: time, with quartiles, over peak memory."""
    figure, axes = new_figure(len(panels))
    for panel, (title, points) in zip(axes, panels.items(), strict=True):
        for series in dict.fromkeys(point.series for point in points):
            mine = sorted((point for point in points if point.series == series),
                          key=lambda point: point.peak_bytes)
            sizes = [point.peak_bytes / MEGABYTE for point in mine]
            times = [point.time for point in mine]
            panel.errorbar(sizes, [time.median for time in times], label=series, marker="o",
                           linestyle="-" if series in (PLANS, CHUNKED) else "", elinewidth=0.7,
                           yerr=[[time.median - time.low for time in times],
                                 [time.high - time.median for time in times]])
            for point in mine if series not in (PLANS, CHUNKED) else ():
                panel.annotate(f" {point.label}", (point.peak_bytes / MEGABYTE, point.time.median))
        panel.axhline(1, color="grey", linewidth=0.8, linestyle=":")
        panel.set(title=title, xlim=(0, None), ylim=(0, None),
                  xlabel="measured peak above resident memory (MB)",
                  ylabel=f"time of a step ÷ {points[0].series}")
        panel.legend(fontsize="small", loc="lower left")
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and draw it."""
    parser = benchmark_parser("curve", __doc__, rounds=9, threads=1, time_limit=20.0)
    parser.add_argument("--model", default="gpt2", choices=("gpt2", "bert", "llama", "vit"))
    parser.add_argument("--points", type=int, default=6, help="plans for each executor")
    parser.add_argument("--draw", help="file for the picture; its ending names the format")
    add_names(parser, "--allow", ("recompute", "chunk"), ("recompute",))
    options = parse(parser, argv)
    sizes = (options.model, options.points, options.rounds, options.time_limit)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds; median "
          "[quartiles] of the time of a step ÷ that of the first of its executor", flush=True)
    table = Table("executor:20", "step:31", ":17", "peak MB:.2f", "time:>19")
    panels: dict[str, list[Point]] = {}
    for title in ("op by op", "compiled by Inductor"):
        panels[title] = (op_by_op(*sizes, "chunk" in options.allow) if title == "op by op" else
                         by_inductor(*sizes))
        for point in panels[title]:
            table.row(title, point.series, point.label, point.peak_bytes / MEGABYTE, point.time)
    if options.draw:
        draw(panels, options.draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
