"""`checkpoint-planner max-seq TARGET`."""

from __future__ import annotations

from planner.arguments.planning import Planning
from planner.cli.commands.max_batch import find_largest
from planner.cli.options import (
    Json,
    Output,
    RankOptions,
    SizedTargetOptions,
    SizeOptions,
    command,
)


@command(without=("seq", "inputs"))
def run(target: SizedTargetOptions, sizes: SizeOptions, planning: Planning, ranks: RankOptions,
        save_to: Output = None, json: Json = False) -> None:
    """Find the longest sequences of TARGET whose training step fits a budget."""
    find_largest("sequence", target, sizes, planning, ranks, save_to, json)
