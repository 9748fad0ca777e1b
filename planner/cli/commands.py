"""The commands: each prepares, runs and hands the result to a reporter.

Results go to stdout, progress to stderr and only on a terminal.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.failures import ExitCode, UsageError, reported
from planner.cli.options import (
    Accumulation,
    Budget,
    Json,
    Output,
    PlanningGroup,
    PlanPath,
    Regions,
    TargetGroup,
    expanded,
)
from planner.cli.output import print_json, print_report
from planner.cli.target import load_target

app = typer.Typer(
    name="checkpoint-planner", add_completion=False, pretty_exceptions_enable=False,
    no_args_is_help=True, rich_markup_mode=None,
    help="Plan which activations of a PyTorch training step to keep and which to recompute.")

@app.command("plan")
@expanded
def plan_command(
    target: TargetGroup, planning: PlanningGroup, budget: Budget = None, output: Output = None,
    accumulation: Accumulation = 1, regions: Regions = "model", json: Json = False,
) -> None:
    """Plan one training step of TARGET under a budget and print the plan."""
    with reported():
        from planner.api import plan
        from planner.arguments.budget import parse_budget
        from planner.reporters.table import plan_report

        parse_budget(None, budget)
        arguments = planning.arguments()
        if output is not None:
            check_writable(output)
        model, example = load_target(target.options(), device="meta")
        made = plan(model, example, budget=budget, accumulation=accumulation, regions=regions,
                    **arguments)
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
        from planner.plans.file import load
        from planner.reporters.table import plan_report

        plan = load(path)
        if json:
            print_json(plan.to_dict())
        else:
            print_report(plan_report(plan))


@app.command("frontier")
@expanded
def frontier_command(
    target: TargetGroup, planning: PlanningGroup,
    points: Annotated[int, typer.Option("--points", min=2, help="How many budgets.")] = 20,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the curve: .png, .svg.")] = None,
    regions: Regions = "model", json: Json = False,
) -> None:
    """Print the memory/overhead curve of TARGET."""
    with reported():
        from planner.reporters.table import frontier_report
        from planner.sizes.frontier import frontier

        arguments = planning.arguments()
        if plot is not None:
            check_writable(plot)
        model, example = load_target(target.options(), device="meta")
        curve = frontier(model, example, points=points, regions=regions, **arguments)
        if plot is not None:
            curve.plot(plot)
        if json:
            print_json(curve.to_dict())
        else:
            print_report(frontier_report(curve.plans))


@app.command("verify")
@expanded
def verify_command(
    target: TargetGroup, path: PlanPath,
    device: Annotated[str, typer.Option("--device", help="Where the steps run.")] = "cpu",
    json: Json = False,
) -> None:
    """Run one plain and one planned training step of TARGET and compare them."""
    with reported():
        from planner.plans.file import load
        from planner.reporters.table import verification_report
        from planner.running.verify import verify

        plan = load(path)
        model, example = load_target(target.options(), device=device)
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


def check_writable(path: Path) -> None:
    """Raise before the work, not after it, where a result could not be written."""
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    if not folder.is_dir():
        raise FileNotFoundError(2, "there is no such folder to write to", str(folder))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(13, "not allowed to write here", str(path))
