"""A training loop beside a budget, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from planner.reporters.memory_table import plain_table, title
from planner.training_loop.budget_check import BudgetCheck
from planner.units import format_bytes


def budget_report(check: BudgetCheck) -> RenderableType:
    """Whether the loop fits, and which phases do not."""
    within = f"{format_bytes(check.budget_bytes)} ({check.budget_bytes:,} bytes)"
    if check.fits:
        left = format_bytes(check.budget_bytes - check.peak_bytes)
        return Text(f"fits in {within}: {left} are left")
    table = plain_table()
    table.add_column("over the budget")
    table.add_column("peak", justify="right")
    table.add_column("over by", justify="right")
    for each in check.over:
        table.add_row(f"{each.step}: {each.phase}", format_bytes(each.peak_bytes),
                      format_bytes(each.peak_bytes - check.budget_bytes))
    return Group(title(f"Does not fit in {within}"), table, Text(check.remedy))
