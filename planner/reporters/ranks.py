"""The memory of one rank of a data-parallel run, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.ranks.data_parallel import RankMemory


def rank_report(report: RankMemory) -> RenderableType:
    """What one rank holds at its peak, and what is communicated in which portions."""
    moment = ("the optimizer's step" if report.optimizer_step_peak_bytes
              > report.forward_backward_peak_bytes else "forward and backward")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("category")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    for category, size in report.memory.items():
        share = size / report.peak_bytes if report.peak_bytes else 0.0
        table.add_row(category.replace("_", " "), format_bytes(size), f"{share:.1%}")
    table.add_section()
    table.add_row("total", format_bytes(report.peak_bytes), f"{report.peak_bytes:,} bytes")
    parts: list[RenderableType] = [
        Text(f"One of {report.parallel.ranks} ranks under {report.parallel.kind}, at the peak in "
             f"{moment}", style="bold"), table,
        Text(f"resident between steps: {format_bytes(report.resident_bytes)}")]
    if report.bucket_bytes:
        parts.append(Text(f"{len(report.bucket_bytes)} buckets of up to "
                          f"{format_bytes(max(report.bucket_bytes))}"))
    if report.units:
        name, size = max(report.units, key=lambda unit: unit[1])
        parts.append(Text(f"{len(report.units)} units; the largest, {name or 'the root'}, is "
                          f"{format_bytes(size)} when gathered"))
    parts.extend(Text(f"note: {note}") for note in report.notes)
    return Group(*parts)
