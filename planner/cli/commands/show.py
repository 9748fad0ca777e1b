"""`checkpoint-planner show PLAN.json`: print a saved plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import Json, PlanPath, command
from planner.cli.output import check_plot, print_result


@command()
def run(path: PlanPath, plot: Annotated[Path | None, typer.Option(
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
