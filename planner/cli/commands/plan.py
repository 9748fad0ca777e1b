"""`checkpoint-planner plan TARGET --budget 8GB`: make one plan."""

from __future__ import annotations

from dataclasses import replace

from planner.arguments.planning import Planning
from planner.cli.options import Budget, Json, Output, RankOptions, TargetOptions, command
from planner.cli.output import check_writable, print_result


@command()
def run(target: TargetOptions, planning: Planning, ranks: RankOptions, budget: Budget = None,
        save_to: Output = None, json: Json = False) -> None:
    """Plan one training step of TARGET under a budget and print the plan."""
    from planner.api import plan
    from planner.arguments.budget import parse_budget
    from planner.cli.target import load_target
    from planner.reporters.table import plan_report

    parse_budget(None, budget)
    parallel = ranks.settings()
    check_writable(save_to)
    model, example, loss_fn = load_target(target, device="meta")
    planning = replace(planning, loss_fn=loss_fn, parallel=parallel)
    made = plan(model, example, budget=budget, **planning.arguments())
    if save_to is not None:
        made.save(save_to)
    print_result(made, plan_report, json=json)
