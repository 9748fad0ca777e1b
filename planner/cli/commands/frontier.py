"""`checkpoint-planner frontier TARGET`: extra time as a function of the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from planner.arguments.planning import Planning
from planner.cli.options import Json, RankOptions, TargetOptions, command
from planner.cli.output import check_plot, print_result


@command()
def run(
    target: TargetOptions, planning: Planning, ranks: RankOptions,
    points: Annotated[int, typer.Option("--points", min=2, help="How many budgets.")] = 20,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the curve: .png, .svg.")] = None,
    json: Json = False,
) -> None:
    """Print the memory/overhead curve of TARGET."""
    from planner.cli.target import load_target
    from planner.reporters.table import frontier_report
    from planner.sizes.frontier import frontier

    check_plot(plot)
    parallel = ranks.settings()
    model, example, loss_fn = load_target(target, device="meta")
    curve = frontier(model, example, points=points,
                     **replace(planning, loss_fn=loss_fn, parallel=parallel).arguments())
    if plot is not None:
        curve.plot(plot)
    print_result(curve, lambda curve: frontier_report(curve.plans), json=json)
