"""Plans for Inductor: peaks, gradients, and times compared with `activation_memory_budget`.

    python -m benchmarks.compiled --model gpt2,llama,bert,vit,unet --rounds 9

Peaks are allocator events of a compiled step, above resident memory; times are ratios of steps run
in turns, to `torch.compile(model)`.  The models return only their loss.  Two tables:

- budgets: plans at fractions of the peak of `torch.compile(model)`, and the plan of the smallest
  peak.  Gradients are compared with those of `torch.compile(model)` after the same seed.  With
  `--fallback-random` random numbers are those of eager PyTorch, and gradients are compared with the
  plain model's.
- torch: the peak of each ratio is read from the generated code.  Two ratios run in turns with plans
  whose budget is the peak measured there: the ratio of the smallest peak, and the one nearest to
  the middle between it and the default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks.arguments import add_names, add_numbers, benchmark_parser, parse
from benchmarks.measure import MEGABYTE, gradients, peak_bytes, relative_error, time_steps
from benchmarks.models import WORKLOADS, Workload, returning_loss_only
from benchmarks.table import Table
from planner._graph_capture.dynamo.captured_graphs import GraphCode
from planner._graph_capture.module_forward import own_forward
from planner._graph_capture.torch_compat import compile_forward, compile_settings
from planner._graph_capture.torch_compat.inductor import inductor_backend
from planner.errors import InfeasibleBudget
from planner.plans.plan import Plan
from planner.search.compiled import smallest_plan
from planner.search.planning import Effort, plan_within
from planner.step.prepared import PreparedStep

FRACTIONS = (0.8, 0.6, 0.4)
RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
GRADIENT_TOLERANCE = 1e-5


class Compiled(nn.Module):
    """A module whose call is a compiled function of `model`; parameters are the model's."""

    def __init__(self, model: nn.Module, call: Callable[..., Any],
                 settings: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.model = model
        self._call, self._settings = call, settings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._settings():
            return self._call(*args, **kwargs)


def compiled(model: nn.Module, ratio: float = 1.0) -> Compiled:
    """Return `torch.compile(model)` with a value of `activation_memory_budget`."""
    @contextmanager
    def settings() -> Iterator[None]:
        with (compile_settings(donated_buffers=True),
              functorch_config.patch(activation_memory_budget=ratio)):
            yield

    forward = partial(compile_forward(type(model).__name__, "inductor"), model, own_forward(model))
    return Compiled(model, forward, settings)


@dataclass(frozen=True, slots=True)
class Measured:
    """A compiled step that has run."""

    label: str
    model: nn.Module
    peak_bytes: int
    gradients: torch.Tensor
    plan: Plan | None = None


def measure(workload: Workload, label: str, model: nn.Module, plan: Plan | None = None) -> Measured:
    """Measure peak and gradients of `model`, a variant of the workload's model."""
    peak = peak_bytes(workload, model)
    return Measured(label, model, peak, gradients(workload, model), plan)


def within(workload: Workload, prepared: PreparedStep, label: str, net_bytes: int,
           effort: Effort) -> Measured | None:
    """Apply and measure the plan under a budget above resident memory; `None` if nothing fits."""
    try:
        plan = plan_within(prepared, prepared.resident_bytes + net_bytes, effort)
    except InfeasibleBudget as refusal:
        least = (refusal.minimum_bytes - prepared.resident_bytes) / MEGABYTE
        print(f"{workload.name}: nothing fits in {net_bytes / MEGABYTE:.2f} MB; the smallest that "
              f"does is {least:.2f} MB", flush=True)
        return None
    return measure(workload, label, plan.apply(workload.model), plan)


def print_budgets(workload: Workload, prepared: PreparedStep, models: Sequence[Measured],
                  reference: torch.Tensor, rounds: int) -> bool:
    """Print the table of one model, whose first line is `torch.compile`; return whether every
    budget is kept and every gradient right."""
    times = time_steps(workload, [row.model for row in models], rounds)
    table = Table("model:6", "step:13", "budget MB:.2f", "predicted MB:.2f", "measured MB:.2f",
                  "gradient error:.1e", "time:>19", "estimated:.3f")
    good = True
    for index, row in enumerate(models):
        limit = predicted = estimated = None
        if row.plan is not None:
            predicted = (row.plan.peak_bytes - prepared.resident_bytes) / MEGABYTE
            estimated = 1 + row.plan.overhead
            if row.plan.budget_bytes is not None:
                limit = (row.plan.budget_bytes - prepared.resident_bytes) / MEGABYTE
                good &= row.peak_bytes <= row.plan.budget_bytes - prepared.resident_bytes
        error = relative_error(row.gradients, reference)
        good &= error <= GRADIENT_TOLERANCE
        table.row(workload.name, row.label, limit, predicted, row.peak_bytes / MEGABYTE, error,
                  times.ratio(index, 0), estimated)
    return good


def peaks_of_torch(prepared: PreparedStep, ratios: Sequence[float]) -> dict[float, int]:
    """Return the step's peak under each value of `activation_memory_budget`, above resident memory.
    """
    assert prepared.base.compiled is not None
    found = {}
    for ratio in ratios:
        def partition(*args: Any, ratio: float = ratio, **options: Any) -> Any:
            with functorch_config.patch(activation_memory_budget=ratio):
                return min_cut_rematerialization_partition(*args, **options)

        code = GraphCode(inductor_backend(partition, f"ratio {ratio}"))
        found[ratio] = prepared.base.compiled.tracer.trace(lambda _, code=code: code).peak_bytes
    return found


def compare_with_torch(workload: Workload, prepared: PreparedStep, default: Measured,
                       ratios: Sequence[float], rounds: int, effort: Effort) -> bool:
    """Compare torch at its smallest peak and at a middle one with plans at the same peaks; return
    whether the plans win."""
    peaks = peaks_of_torch(prepared, ratios)
    print(f"{workload.name}: torch's peaks by ratio: " + ", ".join(
        f"{ratio:g}: {peak / MEGABYTE:.1f}" for ratio, peak in peaks.items()) + " MB")
    least = min(peaks, key=lambda ratio: peaks[ratio])
    middle = min(peaks, key=lambda ratio: abs(
        peaks[ratio] - (default.peak_bytes + peaks[least]) / 2))
    pairs: list[tuple[Measured, Measured]] = []
    for ratio in dict.fromkeys((middle, least)):
        theirs = measure(workload, f"{ratio:g}", compiled(workload.model, ratio))
        ours = within(workload, prepared, theirs.label, theirs.peak_bytes, effort)
        if ours is None:
            return False
        pairs.append((theirs, ours))
    steps = [default, *(step for pair in pairs for step in pair)]
    times = time_steps(workload, [step.model for step in steps], rounds)
    table = Table("model:6", "ratio:>5", "torch, peak MB:.2f", "torch, time:>19",
                  "plan, peak MB:.2f", "plan, time:>19", "plan / torch:>19")
    won = True
    for number, (theirs, ours) in enumerate(pairs):
        against = times.ratio(2 + 2 * number, 1 + 2 * number)
        won &= against.median <= 1.0
        table.row(workload.name, theirs.label, theirs.peak_bytes / MEGABYTE,
                  times.ratio(1 + 2 * number, 0), ours.peak_bytes / MEGABYTE,
                  times.ratio(2 + 2 * number, 0), against)
    return won


def run(name: str, arguments: argparse.Namespace) -> bool:
    """Print all tables of one model."""
    options = {"layers": arguments.layers} if arguments.layers and name != "unet" else {}
    workload = returning_loss_only(WORKLOADS[name](**options))
    effort = Effort(time_limit=arguments.time_limit)
    random = arguments.fallback_random
    with inductor_config.patch(fallback_random=True) if random else nullcontext():
        prepared = workload.prepare(backend="inductor", regions=arguments.regions)
        default = measure(workload, "torch.compile", compiled(workload.model))
        good = True
        if "budgets" in arguments.tables:
            rows = [default, *(row for part in FRACTIONS if (row := within(
                workload, prepared, f"{part:.0%}", int(part * default.peak_bytes), effort)))]
            plan = smallest_plan(prepared, effort)
            rows.append(measure(workload, "smallest", plan.apply(workload.model), plan))
            reference = gradients(workload, workload.model) if random else default.gradients
            good &= print_budgets(workload, prepared, rows, reference, arguments.rounds)
        if "torch" in arguments.tables:
            good &= compare_with_torch(workload, prepared, default, arguments.ratios,
                                       arguments.rounds, effort)
    return good


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 if a budget, a gradient or a comparison fails."""
    parser = benchmark_parser("compiled", __doc__, models=("gpt2", "llama", "bert", "vit", "unet"),
                              rounds=9, threads=2, time_limit=60.0)
    parser.add_argument("--layers", type=int, help="of the transformers; by default 4")
    add_numbers(parser, "--ratios", RATIOS, "of activation_memory_budget")
    parser.add_argument("--regions", default="model", choices=("model", "blocks"))
    parser.add_argument("--fallback-random", action="store_true")
    add_names(parser, "--tables", ("budgets", "torch"))
    arguments = parse(parser, argv)
    if arguments.regions == "blocks" and "torch" in arguments.tables:
        parser.error("--regions blocks goes with --tables budgets")
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds; "
          "times are ratios to torch.compile(model): median [quartiles]", flush=True)
    good = [run(name, arguments) for name in arguments.model]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
