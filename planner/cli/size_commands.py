"""The commands that vary the size of the step: what fits a budget, and how best to run a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.commands import app, check_writable
from planner.cli.failures import UsageError, reported
from planner.cli.options import (
    Batch,
    Json,
    Output,
    PlanningGroup,
    Seq,
    Settings,
    SizeBudget,
    SizedTarget,
    SizeGroup,
    expanded,
)
from planner.cli.output import print_json, print_report
from planner.cli.sized_target import load_sized_target
from planner.cli.target import TargetOptions


@app.command("max-batch")
@expanded
def max_batch_command(
    target: SizedTarget, sizes: SizeGroup, planning: PlanningGroup, seq: Seq = None,
    settings: Settings = None, output: Output = None, json: Json = False,
) -> None:
    """Find the largest batch of TARGET whose training step fits a budget."""
    _largest("batch", TargetOptions(target, seq=seq, settings=tuple(settings or ())), sizes,
             planning, output, json)


@app.command("max-seq")
@expanded
def max_seq_command(
    target: SizedTarget, sizes: SizeGroup, planning: PlanningGroup, batch: Batch = None,
    settings: Settings = None, output: Output = None, json: Json = False,
) -> None:
    """Find the longest sequences of TARGET whose training step fits a budget."""
    _largest("sequence", TargetOptions(target, batch=batch, settings=tuple(settings or ())), sizes,
             planning, output, json)


@app.command("advise")
@expanded
def advise_command(
    target: SizedTarget, budget: SizeBudget,
    effective_batch: Annotated[int, typer.Option(
        "--effective-batch", min=1, help="Samples for each step of the optimizer.")],
    planning: PlanningGroup, seq: Seq = None, settings: Settings = None, output: Output = None,
    json: Json = False,
) -> None:
    """List the ways to run an effective batch of TARGET within a budget, the fastest first."""
    with reported():
        from planner.arguments.budget import absolute_budget
        from planner.reporters.choices import advice_report
        from planner.sizes.advice import advise

        arguments = planning.arguments()
        absolute_budget(None, budget, "which differs with the batch")
        if output is not None:
            check_writable(output)
        found = load_sized_target(TargetOptions(target, seq=seq, settings=tuple(settings or ())),
                                  "batch", first=1, device="meta")
        advice = advise(found.make_inputs, found.model, effective_batch=effective_batch,
                        budget=budget, **arguments)
        if output is not None and advice.best.plan is not None:
            advice.best.plan.save(output)
        if json:
            print_json(advice.to_dict())
        else:
            print_report(advice_report(advice))


def _largest(what: str, options: TargetOptions, sizes: SizeGroup, planning: PlanningGroup,
             output: Path | None, json: bool) -> None:
    with reported():
        from planner.arguments.budget import absolute_budget
        from planner.reporters.choices import largest_report
        from planner.sizes import batch_size

        arguments = planning.arguments()
        absolute_budget(None, sizes.budget, f"which differs with the {what}")
        limit = batch_size.check_overhead(_fraction(sizes.overhead))
        if output is not None:
            check_writable(output)
        first = -(-sizes.smallest // sizes.multiple_of) * sizes.multiple_of
        target = load_sized_target(options, what, first=first, device="meta")
        search = (batch_size.max_batch_size if what == "batch"
                  else batch_size.max_sequence_length)
        found = search(target.make_inputs, target.model, budget=sizes.budget, overhead=limit,
                       plan=sizes.plan, smallest=sizes.smallest, multiple_of=sizes.multiple_of,
                       largest=target.largest if sizes.largest is None else sizes.largest,
                       **arguments)
        if output is not None and found.plan is not None:
            found.plan.save(output)
        if json:
            print_json(found.to_dict())
        else:
            print_report(largest_report(found))


def _fraction(text: str | None) -> float | None:
    """`35%` or `0.35`."""
    if text is None:
        return None
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"--overhead must be such as 35% or 0.35, got {text!r}") from None
