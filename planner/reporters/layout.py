"""Shared parts of the reports: titles, tables, notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich import box
from rich.table import Table
from rich.text import Text

from planner.units import format_bytes


def title(text: str) -> Text:
    """Title of a table."""
    return Text(text, style="bold")


def new_table(*columns: str, fold: str = "") -> Table:
    """A table without lines between its columns, and without a header if no column has a name.

    A column with the prefix `>` is right-aligned; the column `fold` gets the remaining width.
    Lines that are too long are broken, never truncated.
    """
    named = any(column.lstrip(">") for column in columns)
    table = Table(box=box.SIMPLE_HEAD, show_header=named, header_style="bold", pad_edge=False,
                  padding=(0, 1, 0, 0))
    for column in columns:
        name = column.removeprefix(">")
        table.add_column(name, justify="left" if name == column else "right", overflow="fold",
                         ratio=1 if name and name == fold else None)
    return table


def category_table(memory: Mapping[str, int], total: str) -> Table:
    """Bytes by category, and their sum with the text `total`."""
    table, peak_bytes = new_table("category", ">size", ">share"), sum(memory.values())
    for category, size in memory.items():
        share = size / peak_bytes if peak_bytes else 0.0
        table.add_row(category.replace("_", " "), format_bytes(size), f"{share:.1%}")
    table.add_section()
    table.add_row("total", format_bytes(peak_bytes), total)
    return table


def note_lines(notes: Iterable[str], *, optimizer: object = "") -> list[Text]:
    """Lines of notes, with an extra one if `optimizer` is `None`."""
    missing = ["no optimizer was given: its state and its step are not counted"]
    return [Text(f"note: {note}") for note in (*notes, *(missing if optimizer is None else ()))]


def peak_moment(forward_backward_peak_bytes: int, optimizer_step_peak_bytes: int) -> str:
    """The phase of a step with the highest peak, in words."""
    return ("the optimizer's step" if optimizer_step_peak_bytes > forward_backward_peak_bytes
            else "forward and backward")
