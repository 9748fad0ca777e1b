"""Tables of a training loop's memory breakdown: phases, and holders at the peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.reporters.table import category_table, new_table, note_lines, peak_moment, title
from planner.step.categories import CATEGORIES
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.ranks.data_parallel import RankMemory
    from planner.training_loop.report import MemoryHolder, MemoryReport, PhaseMemory


_ROWS = 12
"""Number of holders listed."""
_SHORT = {"parameters": "param.", "gradients": "grad.", "optimizer": "optim.",
          "activations": "activ.", "temporaries": "temp."}


def memory_report(report: MemoryReport) -> RenderableType:
    """Summary, phases, and memory at the peak by holder."""
    return Group(
        title("Training loop"), _summary(report),
        title("Peak of each phase, by category"), _phases(report),
        title(f"What holds the memory at the peak, in the {_moment(report)}"), _holders(report),
        *note_lines(report.notes, optimizer=report.optimizer))


def _moment(report: MemoryReport) -> str:
    if report.fullest is report.loading:
        return "loading"
    step = "first step" if report.fullest in report.first.phases else "later steps"
    return f"{report.fullest.phase} of the {step}"


def _summary(report: MemoryReport) -> Table:
    table = new_table("", ">", "")
    table.add_row("peak", format_bytes(report.peak_bytes),
                  f"{report.peak_bytes:,} bytes, in the {_moment(report)}")
    if report.reserved_bytes is not None:
        table.add_row("reserved", format_bytes(report.reserved_bytes),
                      f"{report.reserved_bytes:,} bytes by torch's allocator, workspaces of cuBLAS "
                      "included")
    table.add_row("first step", format_bytes(report.first.peak_bytes),
                  f"in the {report.first.fullest.phase}")
    table.add_row("later steps", format_bytes(report.steady.peak_bytes),
                  f"in the {report.steady.fullest.phase}")
    table.add_row("between steps", format_bytes(report.resident_bytes),
                  f"{report.resident_bytes:,} bytes: " + ", ".join(
                      f"{name} {format_bytes(size)}" for name, size in report.resident.items()
                      if size))
    table.add_row("inference", format_bytes(report.inference_peak_bytes),
                  "a forward in eval() without gradients")
    loop = report.loop
    how = [f"device {report.device}", f"accumulation {loop.accumulation}",
           f"set_to_none={loop.set_to_none}"]
    table.add_row("optimizer", report.optimizer or "none", ", ".join(how))
    return table


def _phases(report: MemoryReport) -> Table:
    shown = [name for name in CATEGORIES if any(
        phase.memory[name] for phase in (report.loading, *report.first.phases,
                                         *report.steady.phases))]
    table = new_table("phase", ">peak", *(f">{_SHORT.get(name, name)}" for name in shown))

    def add(name: str, phase: PhaseMemory) -> None:
        mark = " *" if phase is report.fullest else ""
        table.add_row(name + mark, format_bytes(phase.peak_bytes),
                      *(format_bytes(phase.memory[category]) for category in shown))

    add("loading", report.loading)
    for step, phases in (("first step", report.first.phases),
                         ("later steps", report.steady.phases)):
        table.add_section()
        table.add_row(step)
        for phase in phases:
            add(f" {phase.phase}", phase)
    return table


def _holders(report: MemoryReport) -> Table:
    table = new_table(">size", ">share", "category", "module", "made by", ">blocks", fold="module")
    rows = _folded(report.holders)
    for row in rows[:_ROWS]:
        table.add_row(format_bytes(row.size_bytes), f"{row.size_bytes / report.peak_bytes:.1%}",
                      row.category, row.module, row.op, str(row.count))
    rest = rows[_ROWS:]
    if rest:
        size = sum(row.size_bytes for row in rest)
        table.add_row(format_bytes(size), f"{size / report.peak_bytes:.1%}", "",
                      f"{len(rest)} others", "", str(sum(row.count for row in rest)))
    return table


def _folded(holders: Iterable[MemoryHolder]) -> list[MemoryHolder]:
    """Merge layers that differ only in a number; sum named tensors by category."""
    rows: dict[tuple[str, str, str], MemoryHolder] = {}
    for holder in holders:
        path = ".".join("*" if part.isdecimal() else part for part in holder.module.split("."))
        key = ((holder.category, path, holder.op) if holder.category in (
            "activations", "temporaries") else (holder.category, "", ""))
        known = rows.get(key)
        size, count = (known.size_bytes, known.count) if known else (0, 0)
        category, module, op = key
        rows[key] = replace(holder, category=category, module=module, op=op,
                            size_bytes=size + holder.size_bytes, count=count + holder.count)
    return sorted(rows.values(), key=lambda row: (
        -row.size_bytes, row.category, row.module, row.op))


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
