"""`checkpoint-planner show PLAN.json`: a plan that was made before."""

from __future__ import annotations

from planner.cli.options import Json, PlanPath, command
from planner.cli.output import print_result


@command()
def run(path: PlanPath, json: Json = False) -> None:
    """Print a saved plan."""
    from planner.plans.file import load
    from planner.reporters.table import plan_report

    print_result(load(path), plan_report, json=json)
