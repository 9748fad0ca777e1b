"""The commands: each prepares, runs and hands the result to a reporter.

Results go to stdout, progress to stderr and only on a terminal.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.failures import ExitCode, UsageError, reported
from planner.cli.output import print_json, print_report
from planner.cli.target import TargetOptions, load_target

app = typer.Typer(
    name="checkpoint-planner", add_completion=False, pretty_exceptions_enable=False,
    no_args_is_help=True, rich_markup_mode=None,
    help="Plan which activations of a PyTorch training step to keep and which to recompute.")

Target = Annotated[str, typer.Argument(
    metavar="TARGET", help="package.module:factory (returns a model or (model, inputs)), or "
    "hf:CONFIG (a config.json, or a model type such as gpt2).")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Batch size (hf: targets).")]
Seq = Annotated[int | None, typer.Option("--seq", min=1, help="Sequence length (hf: targets).")]
Inputs = Annotated[list[str] | None, typer.Option(
    "--input", metavar="NAME:DTYPE[SHAPE]", help="A keyword input; may be repeated.")]
Settings = Annotated[list[str] | None, typer.Option(
    "--set", metavar="KEY=VALUE", help="A setting of an hf: config; may be repeated.")]
Optimizer = Annotated[str | None, typer.Option("--optimizer", help="sgd, adam, adamw, ...")]
Solver = Annotated[str, typer.Option("--solver", help="auto, none, sqrt_n, dp, ilp, ...")]
Backend = Annotated[str, typer.Option("--backend")]
CostModel = Annotated[str, typer.Option(
    "--cost-model", help="What recomputation costs: roofline (time), measured or flops.")]
Device = Annotated[str | None, typer.Option("--device", help="The device planned for.")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds for the solver.")]
Accumulation = Annotated[int, typer.Option(
    "--accumulation", min=1, help="Micro-steps to each step of the optimizer.")]
Keep = Annotated[list[str] | None, typer.Option(
    "--keep", metavar="NAME", help="Module or op whose results are kept; may be repeated.")]
Regions = Annotated[str, typer.Option(
    "--regions", help='Compiled as one piece: model, blocks, or names of modules.')]
Probe = Annotated[bool, typer.Option(
    "--probe/--no-probe", help="Measure the workspace of single ops.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")]


@app.command("plan")
def plan_command(
    target: Target,
    budget: Annotated[str | None, typer.Option(
        "--budget", help='Peak of the whole step: 8GB (1e9), 8GiB (2**30), 500MB, 60%.')] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan.")] = None,
    optimizer: Optimizer = None, solver: Solver = "auto", batch: Batch = None, seq: Seq = None,
    inputs: Inputs = None, settings: Settings = None, backend: Backend = "eager",
    cost_model: CostModel = "roofline", device: Device = None, time_limit: TimeLimit = 60.0,
    keep: Keep = None, accumulation: Accumulation = 1, regions: Regions = "model",
    probe: Probe = True, json: Json = False,
) -> None:
    """Plan one training step of TARGET under a budget and print the plan."""
    with reported():
        from planner.api import check_effort, plan
        from planner.budget import parse_budget
        from planner.reporters.table import plan_report

        parse_budget(None, budget)
        check_effort(solver, time_limit)
        if output is not None:
            check_writable(output)
        model, example = load_target(target_options(target, batch, seq, inputs, settings),
                                     device="meta")
        made = plan(model, example, budget=budget, optimizer=optimizer, solver=solver,
                    backend=backend, cost_model=cost_model, device=device, probe=probe,
                    time_limit=time_limit, keep=tuple(keep or ()), accumulation=accumulation,
                    regions=regions)
        if output is not None:
            made.save(output)
        if json:
            print_json(made.to_dict())
        else:
            print_report(plan_report(made))


@app.command("show")
def show_command(path: PlanPath, json: Json = False) -> None:
    """Print a saved plan."""
    with reported():
        from planner.plan_file import load
        from planner.reporters.table import plan_report

        plan = load(path)
        if json:
            print_json(plan.to_dict())
        else:
            print_report(plan_report(plan))


@app.command("frontier")
def frontier_command(
    target: Target,
    points: Annotated[int, typer.Option("--points", min=2, help="How many budgets.")] = 20,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the curve: .png, .svg.")] = None,
    optimizer: Optimizer = None, solver: Solver = "auto", batch: Batch = None, seq: Seq = None,
    inputs: Inputs = None, settings: Settings = None, backend: Backend = "eager",
    cost_model: CostModel = "roofline", device: Device = None, time_limit: TimeLimit = 60.0,
    keep: Keep = None, regions: Regions = "model", probe: Probe = True, json: Json = False,
) -> None:
    """Print the memory/overhead curve of TARGET."""
    with reported():
        from planner.api import check_effort
        from planner.frontier import frontier
        from planner.reporters.table import frontier_report

        check_effort(solver, time_limit)
        if plot is not None:
            check_writable(plot)
        model, example = load_target(target_options(target, batch, seq, inputs, settings),
                                     device="meta")
        curve = frontier(model, example, points=points, optimizer=optimizer, solver=solver,
                         backend=backend, cost_model=cost_model, device=device, probe=probe,
                         time_limit=time_limit, keep=tuple(keep or ()), regions=regions)
        if plot is not None:
            curve.plot(plot)
        if json:
            print_json(curve.to_dict())
        else:
            print_report(frontier_report(curve.plans))


@app.command("verify")
def verify_command(
    target: Target, path: PlanPath, batch: Batch = None, seq: Seq = None, inputs: Inputs = None,
    settings: Settings = None,
    device: Annotated[str, typer.Option("--device", help="Where the steps run.")] = "cpu",
    json: Json = False,
) -> None:
    """Run one plain and one planned training step of TARGET and compare them."""
    with reported():
        from planner.plan_file import load
        from planner.reporters.table import verification_report
        from planner.verify import verify

        plan = load(path)
        model, example = load_target(target_options(target, batch, seq, inputs, settings),
                                     device=device)
        verification = verify(model, plan, example)
        if json:
            print_json(verification.to_dict())
        else:
            print_report(verification_report(verification))
        if not verification.ok:
            raise typer.Exit(int(ExitCode.ERROR))


def main() -> None:
    """Entry point of `checkpoint-planner`."""
    app()


def target_options(target: str, batch: int | None, seq: int | None, inputs: list[str] | None,
                   settings: list[str] | None) -> TargetOptions:
    """What the options of a command say about its target."""
    return TargetOptions(target, batch, seq, tuple(inputs or ()), tuple(settings or ()))


def check_writable(path: Path) -> None:
    """Raise before the work, not after it, where a result could not be written."""
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    if not folder.is_dir():
        raise FileNotFoundError(2, "there is no such folder to write to", str(folder))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(13, "not allowed to write here", str(path))
