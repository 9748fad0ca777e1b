"""The commands that vary the size of the step: what fits a budget, and how best to run a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from planner.cli.commands import (
    Backend,
    Batch,
    CostModel,
    Device,
    Json,
    Keep,
    Optimizer,
    Probe,
    Seq,
    Settings,
    Solver,
    TimeLimit,
    app,
    check_writable,
)
from planner.cli.failures import UsageError, reported
from planner.cli.output import print_json, print_report
from planner.cli.sized_target import load_sized_target
from planner.cli.target import TargetOptions

SizedTargetArgument = Annotated[str, typer.Argument(
    metavar="TARGET", help="package.module:factory (called with the size, returns "
    "(model, inputs)), or hf:CONFIG (a config.json, or a model type such as gpt2).")]
Budget = Annotated[str, typer.Option(
    "--budget", help="Peak of the whole step: 8GB (1e9), 8GiB (2**30), 500MB.")]
Overhead = Annotated[str | None, typer.Option(
    "--overhead", help="The most extra time that a plan may cost: 35% or 0.35.")]
Smallest = Annotated[int, typer.Option("--smallest", min=1, help="Where the range begins.")]
Largest = Annotated[int | None, typer.Option("--largest", min=1, help="Where the range ends.")]
MultipleOf = Annotated[int, typer.Option("--multiple-of", min=1, help="Try multiples of this.")]
Planned = Annotated[bool, typer.Option(
    "--plan/--no-plan", help="Look for the largest with a plan, too.")]
Output = Annotated[Path | None, typer.Option(
    "--output", "-o", help="Save the plan of the largest, or of the best choice.")]


@app.command("max-batch")
def max_batch_command(
    target: SizedTargetArgument, budget: Budget, overhead: Overhead = None,
    smallest: Smallest = 1, largest: Largest = None, multiple_of: MultipleOf = 1,
    plan: Planned = True, output: Output = None, optimizer: Optimizer = None,
    solver: Solver = "auto", seq: Seq = None, settings: Settings = None,
    backend: Backend = "eager", cost_model: CostModel = "roofline", device: Device = None,
    time_limit: TimeLimit = 60.0, keep: Keep = None, probe: Probe = True, json: Json = False,
) -> None:
    """Find the largest batch of TARGET whose training step fits a budget."""
    _largest("batch", TargetOptions(target, seq=seq, settings=tuple(settings or ())), output, json,
             budget=budget, overhead=overhead, smallest=smallest, largest=largest,
             multiple_of=multiple_of, plan=plan, optimizer=optimizer, solver=solver,
             backend=backend, cost_model=cost_model, device=device, time_limit=time_limit,
             keep=tuple(keep or ()), probe=probe)


@app.command("max-seq")
def max_seq_command(
    target: SizedTargetArgument, budget: Budget, overhead: Overhead = None,
    smallest: Smallest = 1, largest: Largest = None, multiple_of: MultipleOf = 1,
    plan: Planned = True, output: Output = None, optimizer: Optimizer = None,
    solver: Solver = "auto", batch: Batch = None, settings: Settings = None,
    backend: Backend = "eager", cost_model: CostModel = "roofline", device: Device = None,
    time_limit: TimeLimit = 60.0, keep: Keep = None, probe: Probe = True, json: Json = False,
) -> None:
    """Find the longest sequences of TARGET whose training step fits a budget."""
    _largest("sequence", TargetOptions(target, batch=batch, settings=tuple(settings or ())), output,
             json, budget=budget, overhead=overhead, smallest=smallest, largest=largest,
             multiple_of=multiple_of, plan=plan, optimizer=optimizer, solver=solver,
             backend=backend, cost_model=cost_model, device=device, time_limit=time_limit,
             keep=tuple(keep or ()), probe=probe)


@app.command("advise")
def advise_command(
    target: SizedTargetArgument, budget: Budget,
    effective_batch: Annotated[int, typer.Option(
        "--effective-batch", min=1, help="Samples for each step of the optimizer.")],
    output: Output = None, optimizer: Optimizer = None, solver: Solver = "auto", seq: Seq = None,
    settings: Settings = None, backend: Backend = "eager", device: Device = None,
    time_limit: TimeLimit = 60.0, keep: Keep = None, probe: Probe = True, json: Json = False,
) -> None:
    """List the ways to run an effective batch of TARGET within a budget, the fastest first."""
    with reported():
        from planner.advice import advise
        from planner.api import check_effort
        from planner.batch_size import absolute_budget
        from planner.reporters.choices import advice_report

        check_effort(solver, time_limit)
        absolute_budget(None, budget, "batch")
        if output is not None:
            check_writable(output)
        found = load_sized_target(TargetOptions(target, seq=seq, settings=tuple(settings or ())),
                                  "batch", first=1, device="meta")
        advice = advise(found.make_inputs, found.model, effective_batch=effective_batch,
                        budget=budget, optimizer=optimizer, solver=solver, backend=backend,
                        device=device, probe=probe, time_limit=time_limit, keep=tuple(keep or ()))
        if output is not None and advice.best.plan is not None:
            advice.best.plan.save(output)
        if json:
            print_json(advice.to_dict())
        else:
            print_report(advice_report(advice))


def _largest(what: str, options: TargetOptions, output: Path | None, json: bool, *,
             budget: str, overhead: str | None, smallest: int, largest: int | None,
             **settings: Any) -> None:
    with reported():
        from planner import batch_size
        from planner.api import check_effort
        from planner.reporters.choices import largest_report

        check_effort(settings["solver"], settings["time_limit"])
        batch_size.absolute_budget(None, budget, what)
        limit = batch_size.check_overhead(_fraction(overhead))
        if output is not None:
            check_writable(output)
        multiple_of = settings["multiple_of"]
        first = -(-smallest // multiple_of) * multiple_of
        target = load_sized_target(options, what, first=first, device="meta")
        search = (batch_size.max_batch_size if what == "batch"
                  else batch_size.max_sequence_length)
        found = search(target.make_inputs, target.model, budget=budget, overhead=limit,
                       smallest=smallest, largest=target.largest if largest is None else largest,
                       **settings)
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
