"""The commands of `checkpoint-planner`: each prepares, calls the public function, and prints.

The signature of a command declares its options (`planner.cli.options`).  The modules that do the
work are imported when it runs: `--help` needs neither torch nor a solver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from planner.arguments.planning import Planning
from planner.cli.options import (
    Budget,
    Json,
    Output,
    PlanPath,
    RankOptions,
    SizedTargetOptions,
    SizeOptions,
    TargetOptions,
    command,
)
from planner.cli.output import (
    ExitCode,
    UsageError,
    check_plot,
    check_writable,
    print_result,
)

NAME = "checkpoint-planner"


@command()
def plan(target: TargetOptions, planning: Planning, ranks: RankOptions, budget: Budget = None,
        save_to: Output = None, json: Json = False) -> None:
    """Plan one training step of TARGET under a budget and print the plan."""
    from planner.api import plan as make_plan
    from planner.arguments.budget import parse_budget
    from planner.cli.target import load_target
    from planner.reporters.table import plan_report

    parse_budget(None, budget)
    parallel = ranks.settings()
    check_writable(save_to)
    model, example, loss_fn = load_target(target, device="meta")
    planning = replace(planning, loss_fn=loss_fn, parallel=parallel)
    made = make_plan(model, example, budget=budget, **planning.arguments())
    if save_to is not None:
        made.save(save_to)
    print_result(made, plan_report, json=json)


@command()
def show(path: PlanPath, plot: Annotated[Path | None, typer.Option(
        "--plot", metavar="FILE", help="Draw memory over the step: .png, .svg.")] = None,
        json: Json = False) -> None:
    """Print a saved plan; optionally draw it."""
    from planner.plans.file import load
    from planner.reporters.table import plan_report

    check_plot(plot)
    plan = load(path)
    if plot is not None:
        plan.plot(plot)
    print_result(plan, plan_report, json=json)


@command()
def frontier(
    target: TargetOptions, planning: Planning, ranks: RankOptions,
    points: Annotated[int, typer.Option("--points", min=2, help="How many budgets.")] = 20,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the curve: .png, .svg.")] = None,
    json: Json = False,
) -> None:
    """Print the memory/overhead curve of TARGET."""
    from planner.cli.target import load_target
    from planner.reporters.table import frontier_report
    from planner.sizes.frontier import frontier as trace

    check_plot(plot)
    parallel = ranks.settings()
    model, example, loss_fn = load_target(target, device="meta")
    curve = trace(model, example, points=points,
                            **replace(planning, loss_fn=loss_fn, parallel=parallel).arguments())
    if plot is not None:
        curve.plot(plot)
    print_result(curve, lambda curve: frontier_report(curve.plans), json=json)


@command()
def verify(target: TargetOptions, path: PlanPath,
           device: Annotated[str, typer.Option("--device", help="Where the steps run.")] = "cpu",
           json: Json = False) -> None:
    """Run one plain and one planned training step of TARGET and compare them."""
    from planner.cli.target import load_target
    from planner.plans.file import load
    from planner.reporters.table import verification_report
    from planner.running.verify import verify as compare

    plan = load(path)
    _check_device(device)
    model, example, loss_fn = load_target(target, device=device)
    verification = compare(model, plan, example, loss_fn=loss_fn)
    print_result(verification, verification_report, json=json)
    if not verification.ok:
        raise typer.Exit(int(ExitCode.ERROR))


def _check_device(device: str) -> None:
    import torch

    try:
        is_meta = torch.zeros(1, device=device).is_meta
    except Exception as error:
        raise UsageError(f"--device {device!r}: no step can run there: {error}") from None
    if is_meta:
        raise UsageError("--device meta: no step can run there; name a real device, such as cpu")


@command(without=("batch", "inputs"))
def max_batch(target: SizedTargetOptions, sizes: SizeOptions, planning: Planning,
              ranks: RankOptions, save_to: Output = None, json: Json = False) -> None:
    """Find the largest batch of TARGET whose training step fits a budget."""
    _find_largest("batch", target, sizes, planning, ranks, save_to, json)


def _find_largest(what: str, options: SizedTargetOptions, sizes: SizeOptions, planning: Planning,
                  ranks: RankOptions, save_to: Path | None, json: bool) -> None:
    """Find the largest size, `batch` or `sequence`, and print it."""
    from planner.arguments.budget import absolute_budget
    from planner.cli.target import load_sized_target
    from planner.reporters.choices import largest_report
    from planner.sizes.batch_size import check_overhead, max_batch_size, max_sequence_length

    absolute_budget(None, sizes.budget, f"which differs with the {what}")
    planning = replace(planning, parallel=ranks.settings())
    limit = check_overhead(_fraction(sizes.overhead))
    check_writable(save_to)
    first = -(-sizes.smallest // sizes.multiple_of) * sizes.multiple_of
    target = load_sized_target(options, what, first=first)
    search = max_batch_size if what == "batch" else max_sequence_length
    found = search(target.model, target.make_inputs, budget=sizes.budget, overhead=limit,
                   plan=sizes.plan, smallest=sizes.smallest, multiple_of=sizes.multiple_of,
                   largest=target.largest if sizes.largest is None else sizes.largest,
                   make_loss_fn=target.make_loss_fn,
                   **replace(planning, loss_fn=target.loss_fn).arguments())
    if save_to is not None and found.plan is not None:
        found.plan.save(save_to)
    print_result(found, largest_report, json=json)


def _fraction(text: str | None) -> float | None:
    """Parse `35%` or `0.35`."""
    if text is None:
        return None
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"--overhead must be such as 35% or 0.35, got {text!r}") from None


@command(without=("seq", "inputs"))
def max_seq(target: SizedTargetOptions, sizes: SizeOptions, planning: Planning,
            ranks: RankOptions, save_to: Output = None, json: Json = False) -> None:
    """Find the longest sequences of TARGET whose training step fits a budget."""
    _find_largest("sequence", target, sizes, planning, ranks, save_to, json)


@command(without=("batch", "inputs", "accumulation"), sizes=("budget",))
def advise(
    target: SizedTargetOptions, sizes: SizeOptions,
    effective_batch: Annotated[int, typer.Option(
        "--effective-batch", min=1, help="Samples for each step of the optimizer.")],
    planning: Planning, ranks: RankOptions, save_to: Output = None, json: Json = False,
) -> None:
    """List the ways to run an effective batch of TARGET within a budget, the fastest first."""
    from planner.arguments.budget import absolute_budget
    from planner.cli.target import load_sized_target
    from planner.reporters.choices import advice_report
    from planner.sizes.advice import advise as find_choices

    absolute_budget(None, sizes.budget, "which differs with the batch")
    check_writable(save_to)
    planning = replace(planning, parallel=ranks.settings())
    found = load_sized_target(target, "batch", first=1)
    arguments = replace(planning, loss_fn=found.loss_fn).arguments()
    del arguments["accumulation"]
    advice = find_choices(found.model, found.make_inputs, effective_batch=effective_batch,
                          budget=sizes.budget, make_loss_fn=found.make_loss_fn, **arguments)
    if save_to is not None and advice.best.plan is not None:
        advice.best.plan.save(save_to)
    print_result(advice, advice_report, json=json)


class ZeroGrad(StrEnum):
    """Point at which the loop resets gradients."""

    AFTER_STEP = "after_step"
    BEFORE_BACKWARD = "before_backward"


class HoldOutput(StrEnum):
    """Lifetime of the model's output in the loop."""

    BACKWARD = "backward"
    STEP = "step"
    LOOP = "loop"


@command(planning=("optimizer", "accumulation", "device", "gpu", "probe", "autocast",
                   "optimizer_in_backward"))
def memory(
    target: TargetOptions, planning: Planning, ranks: RankOptions,
    plan_path: Annotated[Path | None, typer.Option(
        "--plan", metavar="PLAN.json", help="Count forward and backward as this plan has them.")
    ] = None,
    grad_clip: Annotated[float | None, typer.Option(
        "--grad-clip", help="Largest norm of the gradients.")] = None,
    grad_scaler: Annotated[bool, typer.Option(
        "--grad-scaler", help="A GradScaler scales the loss and makes the step.")] = False,
    set_to_none: Annotated[bool, typer.Option(
        "--set-to-none/--set-to-zero", help="What zero_grad does with gradients.")] = True,
    zero_grad: Annotated[ZeroGrad, typer.Option(
        "--zero-grad", help="Where gradients are reset.")] = ZeroGrad.AFTER_STEP,
    hold_output: Annotated[HoldOutput, typer.Option(
        "--hold-output", help="How long output and loss are held.")] = HoldOutput.STEP,
    drop_output: Annotated[bool, typer.Option(
        "--drop-output", help="The caller keeps only the loss, not the output.")] = False,
    json: Json = False,
) -> None:
    """Print the memory of a training loop of TARGET by phase."""
    from planner.cli.target import load_target
    from planner.plans.file import load
    from planner.reporters.memory_table import memory_report
    from planner.training_loop.memory import memory as predict

    plan = None if plan_path is None else load(plan_path)
    model, example, loss_fn = load_target(target, device="meta")
    report = predict(
        model, example, loss_fn=loss_fn, optimizer=planning.optimizer, plan=plan,
        accumulation=planning.accumulation, autocast=planning.autocast, grad_clip=grad_clip,
        grad_scaler=grad_scaler, set_to_none=set_to_none, zero_grad=zero_grad.value,
        hold_output=not drop_output and hold_output.value, parallel=ranks.settings(),
        device=planning.device, gpu=planning.gpu,
        probe=planning.probe, optimizer_in_backward=planning.optimizer_in_backward)
    print_result(report, memory_report, json=json)


COMMANDS: dict[str, Callable[..., None]] = {
    "plan": plan, "show": show, "frontier": frontier, "verify": verify, "max-batch": max_batch,
    "max-seq": max_seq, "advise": advise, "memory": memory}
"""By name, in the order of the help."""


def commands() -> Callable[..., Any]:
    """All commands as one callable that takes a list of arguments."""
    app = typer.Typer(
        name=NAME, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
        help="Plan which activations of a PyTorch training step to keep and which to recompute.")
    for name, function in COMMANDS.items():
        app.command(name)(function)
    return get_command(app)  # Typer's own wrapper replaces sys.excepthook
