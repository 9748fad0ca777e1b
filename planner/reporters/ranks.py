"""Table of the memory of one rank of a data-parallel run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from planner.reporters.layout import category_table, note_lines, peak_moment, title
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.ranks.rank_memory import RankMemory


def rank_report(report: RankMemory) -> RenderableType:
    """Memory of one rank at its peak, and the size of its collectives."""
    moment = peak_moment(report.forward_backward_peak_bytes, report.optimizer_step_peak_bytes)
    parts: list[RenderableType] = [
        title(f"One of {report.parallel.ranks} ranks under {report.parallel.kind}, at the peak in "
              f"{moment}"),
        category_table(report.memory, f"{report.peak_bytes:,} bytes"),
        Text(f"resident between steps: {format_bytes(report.resident_bytes)}")]
    if report.bucket_bytes:
        parts.append(Text(f"{len(report.bucket_bytes)} buckets of up to "
                          f"{format_bytes(max(report.bucket_bytes))}"))
    if report.units:
        name, size = max(report.units, key=lambda unit: unit[1])
        parts.append(Text(f"{len(report.units)} units; the largest, {name or 'the root'}, is "
                          f"{format_bytes(size)} when gathered"))
    return Group(*parts, *note_lines(report.notes))
