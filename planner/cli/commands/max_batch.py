"""`checkpoint-planner max-batch TARGET`, and code shared with `max-seq`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from planner.arguments.planning import Planning
from planner.cli.failures import UsageError
from planner.cli.options import (
    Json,
    Output,
    RankOptions,
    SizedTargetOptions,
    SizeOptions,
    command,
)
from planner.cli.output import check_writable, print_result


@command(without=("batch", "inputs"))
def run(target: SizedTargetOptions, sizes: SizeOptions, planning: Planning, ranks: RankOptions,
        save_to: Output = None, json: Json = False) -> None:
    """Find the largest batch of TARGET whose training step fits a budget."""
    find_largest("batch", target, sizes, planning, ranks, save_to, json)


def find_largest(what: str, options: SizedTargetOptions, sizes: SizeOptions, planning: Planning,
                 ranks: RankOptions, save_to: Path | None, json: bool) -> None:
    """Find the largest size, `batch` or `sequence`, and print it."""
    from planner.arguments.budget import absolute_budget
    from planner.cli.sized_target import load_sized_target
    from planner.reporters.choices import largest_report
    from planner.sizes.batch_size import check_overhead, max_batch_size, max_sequence_length

    absolute_budget(None, sizes.budget, f"which differs with the {what}")
    planning = replace(planning, parallel=ranks.settings())
    limit = check_overhead(_fraction(sizes.overhead))
    check_writable(save_to)
    first = -(-sizes.smallest // sizes.multiple_of) * sizes.multiple_of
    target = load_sized_target(options, what, first=first, device="meta")
    search = max_batch_size if what == "batch" else max_sequence_length
    found = search(target.model, target.make_inputs, budget=sizes.budget, overhead=limit,
                   plan=sizes.plan, smallest=sizes.smallest, multiple_of=sizes.multiple_of,
                   largest=target.largest if sizes.largest is None else sizes.largest,
                   make_loss_fn=target.make_loss_fn,
                   **replace(planning, loss_fn=target.loss_fn).arguments())
    if save_to is not None and found.plan is not None:
        found.plan.save(save_to)
    print_result(found, largest_report, json=json)


def _fraction(text: str | None) -> float | None:
    """Parse `35%` or `0.35`."""
    if text is None:
        return None
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"--overhead must be such as 35% or 0.35, got {text!r}") from None
