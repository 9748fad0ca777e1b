"""`checkpoint-planner advise TARGET`: the fastest ways to run a batch within a budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from planner.arguments.planning import Planning
from planner.cli.options import (
    Json,
    Output,
    RankOptions,
    SizeBudget,
    SizedTargetOptions,
    command,
)
from planner.cli.output import check_writable, print_result


@command(without=("batch", "inputs", "accumulation"))
def run(
    target: SizedTargetOptions, budget: SizeBudget,
    effective_batch: Annotated[int, typer.Option(
        "--effective-batch", min=1, help="Samples for each step of the optimizer.")],
    planning: Planning, ranks: RankOptions, save_to: Output = None, json: Json = False,
) -> None:
    """List the ways to run an effective batch of TARGET within a budget, the fastest first."""
    from planner.arguments.budget import absolute_budget
    from planner.cli.sized_target import load_sized_target
    from planner.reporters.choices import advice_report
    from planner.sizes.advice import advise

    absolute_budget(None, budget, "which differs with the batch")
    check_writable(save_to)
    planning = replace(planning, parallel=ranks.settings())
    found = load_sized_target(target, "batch", first=1, device="meta")
    arguments = replace(planning, loss_fn=found.loss_fn).arguments()
    del arguments["accumulation"]
    advice = advise(found.model, found.make_inputs, effective_batch=effective_batch,
                    budget=budget, make_loss_fn=found.make_loss_fn, **arguments)
    if save_to is not None and advice.best.plan is not None:
        advice.best.plan.save(save_to)
    print_result(advice, advice_report, json=json)
