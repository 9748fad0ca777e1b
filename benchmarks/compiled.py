"""Plans for Inductor: do they hold their budgets, are gradients right, and how do they compare with
torch's own `activation_memory_budget`?

    python -m benchmarks.compiled --model gpt2,llama,bert,vit,unet --rounds 9

Peaks are allocator events of a compiled step, above resident memory; times are ratios of steps run
in turns.  The models return nothing but their loss.  Three tables:

- budgets: plans at fractions of the peak of `torch.compile(model)`, and that which takes the least.
  Gradients are compared with those of `torch.compile(model)` after the same seed.
- the same under `torch._inductor.config.fallback_random`, where random numbers are those of eager
  PyTorch, for the models with dropout; gradients are compared with those of the plain model.
- torch's ratios, and plans whose budget is the peak measured there.  What each ratio takes is read
  off the generated code; the smallest of these steps, and the one nearest to the middle between it
  and the default, are compiled and run.

With `--regions blocks` the plans' blocks are compiled one by one, and there is no third table; the
first one's gradients are those of `torch.compile` only for models without dropout.

With `--plans FOLDER` plans are kept there, and read instead of made where they are: a second run
finds them, and Inductor's code in its cache, and does little else than measure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks.against_torch import Compiled, returning_loss_only
from benchmarks.arguments import add_names, add_numbers, benchmark_parser, parse
from benchmarks.measure import MEGABYTE, gradients, peak_bytes, relative_error, time_steps
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import Table
from graph_capture.dynamo.captured_graphs import GraphCode
from graph_capture.torch_compat import compile_module, compile_settings
from graph_capture.torch_compat.inductor import inductor_backend
from planner.errors import InfeasibleBudget
from planner.plans.file import load
from planner.plans.plan import Plan
from planner.search.compiled import smallest_plan
from planner.search.planning import Effort, plan_within
from planner.step.prepared import PreparedStep

FRACTIONS = (0.8, 0.6, 0.4)
RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
WITH_DROPOUT = frozenset({"gpt2", "bert", "t5"})
GRADIENT_TOLERANCE = 1e-5


def compiled(model: nn.Module, ratio: float = 1.0) -> Compiled:
    """`torch.compile(model)` with a value of `activation_memory_budget`."""
    @contextmanager
    def settings() -> Iterator[None]:
        with (compile_settings(donated_buffers=True),
              functorch_config.patch(activation_memory_budget=ratio)):
            yield

    return Compiled(model, compile_module(model, "inductor"), settings)


@dataclass(frozen=True, slots=True)
class Measured:
    """A compiled step that has run."""

    label: str
    model: nn.Module
    peak_bytes: int
    gradients: torch.Tensor
    plan: Plan | None = None


def measure(workload: Workload, label: str, model: nn.Module, plan: Plan | None = None) -> Measured:
    """Peak and gradients of `model`, which computes what the workload's model does."""
    peak = peak_bytes(workload, model)
    return Measured(label, model, peak, gradients(workload, model), plan)


@dataclass(frozen=True)
class Planner:
    """Makes plans for one workload, or reads them."""

    workload: Workload
    prepared: PreparedStep
    time_limit: float
    folder: Path | None
    wanted: Sequence[float]
    """Fractions of the peak of `torch.compile` to plan for."""
    suffix: str = ""

    def plan(self, label: str, budget_bytes: int) -> Plan:
        """The plan within a budget; raises `InfeasibleBudget`."""
        return self._kept(
            label.rstrip("%"), lambda plan: plan.budget_bytes == budget_bytes,
            lambda: plan_within(self.prepared, budget_bytes, Effort(time_limit=self.time_limit)))

    def _kept(self, label: str, is_right: Callable[[Plan], bool], make: Callable[[], Plan]) -> Plan:
        """The plan in the folder, else one that is made, and put there."""
        if self.folder is None:
            return make()
        path = self.folder / f"{self.workload.name}-{label}{self.suffix}.json"
        if path.exists() and is_right(plan := load(path)):
            return plan
        plan = make()
        plan.save(path)
        return plan

    def within(self, label: str, net_bytes: int) -> Measured | None:
        """The plan under a budget above resident memory, applied and measured; `None` where nothing
        fits."""
        try:
            plan = self.plan(label, self.prepared.resident_bytes + net_bytes)
        except InfeasibleBudget as refusal:
            least = refusal.minimum_bytes - self.prepared.resident_bytes
            print(f"{self.workload.name}: nothing fits in {net_bytes / MEGABYTE:.2f} MB; the "
                  f"smallest that does is {least / MEGABYTE:.2f} MB", flush=True)
            return None
        return measure(self.workload, label, plan.apply(self.workload.model), plan)

    def fractions(self, default: Measured) -> list[Measured]:
        """Plans at fractions of a step's peak, where they exist."""
        return [row for fraction in self.wanted if (row := self.within(
            f"{fraction:.0%}", int(fraction * default.peak_bytes)))]

    def smallest(self) -> Measured:
        """The plan that takes the least memory, its peak taken for the budget."""
        def make() -> Plan:
            plan = smallest_plan(self.prepared, Effort(time_limit=self.time_limit))
            return replace(plan, budget_bytes=plan.peak_bytes)

        plan = self._kept("smallest", lambda plan: True, make)
        return measure(self.workload, "smallest", plan.apply(self.workload.model), plan)


def print_budgets(workload: Workload, prepared: PreparedStep, models: Sequence[Measured],
                  reference: torch.Tensor, rounds: int) -> bool:
    """The table of one model, whose first line is `torch.compile`; whether every budget is held and
    every gradient right."""
    times = time_steps(workload, [row.model for row in models], rounds)
    print()
    table = Table("model:6", "step:13", "budget MB:.2f", "predicted MB:.2f", "measured MB:.2f",
                  "over", "gradient error:.1e", "time:>19", "estimated:.3f")
    good = True
    for index, row in enumerate(models):
        error = relative_error(row.gradients, reference)
        planned: tuple[float | None, ...] = (None, None, None)
        over = False
        if row.plan is not None:
            assert row.plan.budget_bytes is not None
            limit = row.plan.budget_bytes - prepared.resident_bytes
            over = row.peak_bytes > limit
            planned = (limit / MEGABYTE, (row.plan.peak_bytes - prepared.resident_bytes) / MEGABYTE,
                       1 + row.plan.overhead)
        good &= not over and error <= GRADIENT_TOLERANCE
        table.row(workload.name, row.label, *planned[:2], row.peak_bytes / MEGABYTE,
                  "OVER" if over else "no", error, times.ratio(index, 0), planned[2])
    return good


def peaks_of_torch(prepared: PreparedStep, ratios: Sequence[float]) -> dict[float, int]:
    """What the step takes under each value of `activation_memory_budget`, above resident memory."""
    assert prepared.base.compiled is not None
    found = {}
    for ratio in ratios:
        def partition(*args: Any, ratio: float = ratio, **options: Any) -> Any:
            with functorch_config.patch(activation_memory_budget=ratio):
                return min_cut_rematerialization_partition(*args, **options)

        code = GraphCode(inductor_backend(partition, f"ratio {ratio}"))
        found[ratio] = prepared.base.compiled.tracer.trace(lambda _, code=code: code).peak_bytes
    return found


def compare_with_torch(planner: Planner, default: Measured, lowest: Measured,
                       ratios: Sequence[float], rounds: int) -> bool:
    """torch at its smallest peak and at a middle one, and plans at the same; whether these win."""
    workload = planner.workload
    peaks = peaks_of_torch(planner.prepared, ratios)
    print(f"\n{workload.name}: torch's peaks by ratio: " + ", ".join(
        f"{ratio:g}: {peak / MEGABYTE:.1f}" for ratio, peak in peaks.items()) + " MB")
    least = min(peaks, key=lambda ratio: peaks[ratio])
    middle = min(peaks, key=lambda ratio: abs(
        peaks[ratio] - (default.peak_bytes + peaks[least]) / 2))
    pairs: list[tuple[Measured, Measured]] = []
    for ratio in dict.fromkeys((middle, least)):
        theirs = measure(workload, f"{ratio:g}", compiled(workload.model, ratio))
        ours = planner.within(theirs.label, theirs.peak_bytes)
        if ours is None:
            print(f"{workload.name}: torch reaches that at {ratio:g}", flush=True)
            return False
        pairs.append((theirs, ours))
    steps = [default, *(step for pair in pairs for step in pair)]
    times = time_steps(workload, [step.model for step in steps], rounds)
    table = Table("model:6", "ratio:>5", "torch, peak MB:.2f", "torch, time:>19",
                  "plan, peak MB:.2f", "plan, time:>19", "plan / torch:>19", "not slower")
    won = True
    for number, (theirs, ours) in enumerate(pairs):
        against = times.ratio(2 + 2 * number, 1 + 2 * number)
        won &= against.median <= 1.0
        table.row(workload.name, theirs.label, theirs.peak_bytes / MEGABYTE,
                  times.ratio(1 + 2 * number, 0), ours.peak_bytes / MEGABYTE,
                  times.ratio(2 + 2 * number, 0), against,
                  "yes" if against.median <= 1.0 else "no")
    smallest_of_torch = peaks[least]
    print(f"{workload.name}: smallest peak: torch {smallest_of_torch / MEGABYTE:.2f} MB, plan "
          f"{lowest.peak_bytes / MEGABYTE:.2f} MB "
          f"({lowest.peak_bytes / smallest_of_torch:.2f} of it)", flush=True)
    return won and lowest.peak_bytes < smallest_of_torch


def run(name: str, arguments: argparse.Namespace) -> bool:
    """All tables of one model."""
    options = {"layers": arguments.layers} if arguments.layers and name != "unet" else {}
    workload = returning_loss_only(WORKLOADS[name](**options))

    def planner_for(suffix: str) -> Planner:
        return Planner(workload, workload.prepare(backend="inductor", regions=arguments.regions),
                       arguments.time_limit, arguments.plans, arguments.fractions, suffix)

    tables, good = arguments.tables, True
    if tables != ("random",):
        planner = planner_for("")
        default = measure(workload, "torch.compile", compiled(workload.model))
        lowest = planner.smallest()
        if "budgets" in tables:
            rows = [default, *planner.fractions(default), lowest]
            good &= print_budgets(workload, planner.prepared, rows, default.gradients,
                                  arguments.rounds)
            if name not in WITH_DROPOUT:
                expected = gradients(workload, workload.model)
                errors = [relative_error(row.gradients, expected) for row in rows]
                print("gradients against plain PyTorch: "
                      + ", ".join(f"{error:.1e}" for error in errors), flush=True)
                # Where torch.compile itself is further from plain PyTorch, plans may be as far.
                good &= max(errors) <= max(GRADIENT_TOLERANCE, 1.01 * errors[0])
        if "torch" in tables:
            good &= compare_with_torch(planner, default, lowest, arguments.ratios,
                                       arguments.rounds)
    if "random" in tables and name in WITH_DROPOUT:
        with inductor_config.patch(fallback_random=True):
            planner = planner_for("-fallback-random")
            default = measure(workload, "torch.compile", compiled(workload.model))
            print("\nfallback_random, gradients against plain PyTorch", end="")
            good &= print_budgets(workload, planner.prepared,
                                  [default, *planner.fractions(default), planner.smallest()],
                                  gradients(workload, workload.model), arguments.rounds)
    return good


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 1 where a budget, a gradient or a comparison fails."""
    parser = benchmark_parser("compiled", __doc__, models=("gpt2", "llama", "bert", "vit", "unet"),
                              rounds=9, threads=2, time_limit=60.0)
    parser.add_argument("--layers", type=int, help="of the transformers; by default 4")
    add_numbers(parser, "--fractions", FRACTIONS, "of the peak of torch.compile(model)")
    add_numbers(parser, "--ratios", RATIOS, "of activation_memory_budget")
    parser.add_argument("--plans", type=Path, help="folder in which plans are kept")
    parser.add_argument("--regions", default="model", choices=("model", "blocks"))
    add_names(parser, "--tables", ("budgets", "random", "torch"))
    arguments = parse(parser, argv)
    if arguments.regions == "blocks" and "torch" in arguments.tables:
        parser.error("--regions blocks goes with --tables budgets,random")
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds; "
          "times are ratios to torch.compile(model): median [quartiles]", flush=True)
    good = [run(name, arguments) for name in arguments.model]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
