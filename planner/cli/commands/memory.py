"""`checkpoint-planner memory TARGET`: memory breakdown of a training loop, with or without a
plan."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.arguments.planning import Planning
from planner.cli.options import Budget, Json, RankOptions, TargetOptions, command
from planner.cli.output import check_writable, print_json, print_report


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
                   "budget_of", "optimizer_in_backward"))
def run(
    target: TargetOptions, planning: Planning, ranks: RankOptions, budget: Budget = None,
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
    load_state_dict: Annotated[bool, typer.Option(
        "--load-state-dict", help="Parameters come from a state dict on the device.")] = False,
    snapshot: Annotated[Path | None, typer.Option(
        "--snapshot", metavar="FILE", help="Save a snapshot for pytorch.org/memory_viz.")] = None,
    json: Json = False,
) -> None:
    """Print the memory of a training loop of TARGET by phase, and check it against a budget."""
    from planner.arguments.budget import absolute_budget
    from planner.cli.target import load_target
    from planner.plans.file import load
    from planner.reporters.memory_table import budget_report, memory_report
    from planner.training_loop.budget_check import check_budget
    from planner.training_loop.memory import memory

    limit = None if budget is None else absolute_budget(
        None, budget, "which is what this command tells")
    check_writable(snapshot)
    plan = None if plan_path is None else load(plan_path)
    model, example, loss_fn = load_target(target, device="meta")
    report = memory(
        model, example, loss_fn=loss_fn, optimizer=planning.optimizer, plan=plan,
        accumulation=planning.accumulation, autocast=planning.autocast, grad_clip=grad_clip,
        grad_scaler=grad_scaler, set_to_none=set_to_none, zero_grad=zero_grad.value,
        hold_output=not drop_output and hold_output.value, load_state_dict=load_state_dict,
        parallel=ranks.settings(), device=planning.device, gpu=planning.gpu,
        probe=planning.probe, optimizer_in_backward=planning.optimizer_in_backward)
    if snapshot is not None:
        report.save_snapshot(snapshot)
    check = None if limit is None else check_budget(report, limit, planning.budget_of)
    if json:
        checked = {} if check is None else {"budget": check.to_dict()}
        print_json({**report.to_dict(), **checked})
    else:
        print_report(memory_report(report))
        if check is not None:
            print_report(budget_report(check))
    if check is not None:
        check.require()
