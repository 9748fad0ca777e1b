"""`checkpoint-planner verify TARGET PLAN.json`: compare a planned step with the plain step."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.cli.failures import ExitCode, UsageError
from planner.cli.options import Json, PlanPath, TargetOptions, command
from planner.cli.output import print_result


@command()
def run(
    target: TargetOptions, path: PlanPath,
    device: Annotated[str, typer.Option("--device", help="Where the steps run.")] = "cpu",
    json: Json = False,
) -> None:
    """Run one plain and one planned training step of TARGET and compare them."""
    from planner.cli.target import load_target
    from planner.plans.file import load
    from planner.reporters.table import verification_report
    from planner.running.verify import verify

    plan = load(path)
    _check_device(device)
    model, example, loss_fn = load_target(target, device=device)
    verification = verify(model, plan, example, loss_fn=loss_fn)
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
