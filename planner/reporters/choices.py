"""Tables of the largest step that fits, and of choices of micro-batch, accumulation and plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from planner.reporters.table import new_table, title
from planner.units import format_bytes, format_fraction

if TYPE_CHECKING:
    from planner.sizes.advice import Advice
    from planner.sizes.batch_size import LargestSize


def largest_report(found: LargestSize) -> RenderableType:
    """Without and with a plan: the largest size, its peak, and why the next does not fit."""
    table = new_table(f"largest {found.what}", ">size", ">peak", ">extra time", ">seconds each",
                      "the next")
    if found.plain is None:
        table.add_row("as it runs today", "none", "", "", "", "")
    else:
        table.add_row("as it runs today", str(found.plain), _bytes(found.plain_peak_bytes), "",
                      _seconds(found.plain_seconds_per_item),
                      _next(found.plain_next, found.plain_next_peak_bytes))
    plan = found.plan
    if plan is not None:
        table.add_row("with a plan", str(found.planned), format_bytes(plan.peak_bytes),
                      format_fraction(plan.overhead), _seconds(found.planned_seconds_per_item),
                      _next_planned(found))
    parts: list[RenderableType] = [
        title(f"Largest {found.what} within {format_bytes(found.budget_bytes)} "
              f"({found.budget_bytes:,} bytes)"), table]
    if found.growth is not None:
        parts.append(Text(f"with a plan {found.growth:.2f} times as large"))
    parts.extend(_skipped(found.what, found.skipped))
    return Group(*parts)


def advice_report(advice: Advice) -> RenderableType:
    """One row per choice, best first."""
    table = new_table(">micro-batch", ">accumulation", "plan", ">peak", ">extra time",
                      ">seconds per sample", ">of the best")
    best = advice.choices[0].seconds_per_sample
    for choice in advice.choices:
        ratio = f"{choice.seconds_per_sample / best:.3f}" if best else "-"
        table.add_row(str(choice.micro_batch), str(choice.accumulation),
                      "yes" if choice.plan is not None else "no", format_bytes(choice.peak_bytes),
                      format_fraction(choice.overhead), _seconds(choice.seconds_per_sample), ratio)
    parallel = advice.best.parallel
    where = "" if parallel is None else f" on {parallel.ranks} ranks under {parallel.kind}"
    return Group(
        title(f"Effective batch {advice.effective_batch}{where} within "
              f"{format_bytes(advice.budget_bytes)} ({advice.budget_bytes:,} bytes)"),
        table, *_skipped("batch", advice.skipped))


def _skipped(what: str, skipped: tuple[tuple[int, str], ...]) -> list[RenderableType]:
    return [Text(f"note: a {what} of {size} was passed over: {reason}")
            for size, reason in skipped]


def _next(size: int | None, peak_bytes: int | None) -> str:
    if size is None:
        return "not tried"
    return f"{size} takes {_bytes(peak_bytes)}"


def _next_planned(found: LargestSize) -> str:
    if found.planned_next is None:
        return "not tried"
    needed = found.planned_next_minimum_bytes
    if found.proven:
        return f"{found.planned_next} is impossible"
    if needed is not None:
        return f"{found.planned_next} needs {format_bytes(needed)}"
    return f"no plan for {found.planned_next} found"


def _bytes(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g}"
