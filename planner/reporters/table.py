"""Plans as tables, through rich: on a terminal in colour, in `str(plan)` as plain text.

Sizes are decimal, as in `budget_gb`; exact byte counts are in the plan's fields.  Decisions are
summed by module.  Layers with equal decisions differ only in a number in their path; they become
one row, `h.0-11.attn`.  If that gives too many rows, modules are summed at a smaller depth.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.units import format_bytes, format_flops, format_fraction

if TYPE_CHECKING:
    from planner.plans.decisions import Decision
    from planner.plans.plan import Plan
    from planner.running.verify import Verification

_NO_TERMINAL = 80
"""Width of tables without a terminal if COLUMNS is not set."""


def plain_text(report: RenderableType) -> str:
    """Render as rich would print, without colour, at the width of the terminal."""
    stream, width = io.StringIO(), shutil.get_terminal_size((_NO_TERMINAL, 24)).columns
    # In a notebook rich would display the report instead of writing it to the stream.
    console = Console(file=stream, width=width, color_system=None, force_terminal=False,
                      markup=False, emoji=False,
                      force_jupyter=False, legacy_windows=False, highlight=False)
    console.print(report)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def plan_report(plan: Plan) -> RenderableType:
    """Summary, memory at the peak, decisions per module, and notes."""
    moment = peak_moment(plan.forward_backward_peak_bytes, plan.optimizer_step_peak_bytes)
    return Group(
        title("Training step" if plan.parallel is None else
              f"Training step of one of {plan.parallel.ranks} ranks under {plan.parallel.kind}"),
        _summary(plan), title(f"Memory at the peak, in {moment}"),
        category_table(plan.memory, "100.0%" if plan.peak_bytes else ""),
        title("What each module keeps for the backward"), _layers(plan), *_kernels(plan),
        *note_lines((*plan.assumptions, *plan.notes), optimizer=plan.optimizer))


def frontier_report(plans: Sequence[Plan]) -> RenderableType:
    """One row per plan of a memory/overhead curve."""
    table = new_table(">peak", ">of plain step", ">extra time", ">at least", "status",
                      ">peak, bytes")
    for plan in plans:
        table.add_row(format_bytes(plan.peak_bytes), _share(plan.peak_bytes, plan),
                      format_fraction(plan.overhead), format_fraction(plan.overhead_bound),
                      plan.status, f"{plan.peak_bytes:,}")
    return Group(title("Peak memory of the step against extra time"), table)


def verification_report(verification: Verification) -> RenderableType:
    """Report of two executed steps, and the verdict."""
    table = new_table("", ">", "")
    predicted, measured = verification.predicted_peak_bytes, verification.peak_bytes
    if verification.budget_bytes is not None:
        table.add_row("budget", format_bytes(verification.budget_bytes),
                      f"{verification.budget_bytes:,} bytes")
    table.add_row("predicted peak", format_bytes(predicted), f"{predicted:,} bytes")
    deviation = f", {measured / predicted - 1:+.2%} off" if predicted else ""
    table.add_row("measured peak", format_bytes(measured), f"{measured:,} bytes{deviation}")
    table.add_row("gradient error", f"{verification.max_gradient_error:.1e}",
                  "relative L2 distance from the step without a plan")
    table.add_row("loss error", f"{verification.loss_error:.1e}", "relative")
    table.add_row("buffers", _equal(verification.buffers_equal), "")
    table.add_row("tolerance", f"{verification.tolerance:.1e}", "of these errors")
    table.add_row("random state", _equal(verification.rng_equal), "")
    table.add_section()
    over = verification.why_unplanned or (
        "" if verification.within_budget else "the measured peak is over the budget")
    table.add_row("verdict", "ok" if verification.ok else "NOT OK", over)
    return Group(title("One plain and one planned step"), table)


def _equal(equal: bool) -> str:
    return "equal" if equal else "DIFFERENT"


def _summary(plan: Plan) -> Table:
    table = new_table("", ">", "")
    limit = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    of = ", of what is reserved" if plan.budget_of == "reserved" else (
        "" if plan.budget_bytes is None else f", {_share(plan.budget_bytes, plan)} of the plain "
        "step")
    table.add_row("budget", limit, "" if plan.budget_bytes is None else
                  f"{plan.budget_bytes:,} bytes{of}")
    table.add_row("predicted peak", format_bytes(plan.peak_bytes),
                  f"{plan.peak_bytes:,} bytes, {_share(plan.peak_bytes, plan)} of the plain step")
    table.add_row("plain step", format_bytes(plan.baseline_peak_bytes),
                  f"{plan.baseline_peak_bytes:,} bytes, as the model runs today")
    if plan.reserved_bytes is not None:
        plain = "" if plan.baseline_reserved_bytes is None else (
            f"; for the plain step {format_bytes(plan.baseline_reserved_bytes)}")
        table.add_row("reserved", format_bytes(plan.reserved_bytes),
                      f"{plan.reserved_bytes:,} bytes by torch's allocator{plain}")
    table.add_row("extra time", format_fraction(plan.overhead),
                  f"{format_flops(plan.recompute_flops)} recomputed of "
                  f"{format_flops(plan.step_flops)} in a step")
    if plan.offloaded_bytes:
        table.add_row("on the host", format_bytes(plan.offloaded_bytes),
                      f"{plan.offloaded_bytes:,} bytes, copied there and back beside the ops in "
                      f"{plan.transfer_seconds:.3g} s")
    proof = "no schedule does better" if plan.status == "optimal" else "best schedule found"
    table.add_row("at least", format_fraction(plan.overhead_bound), f"{plan.status}: {proof}")
    seconds = "" if plan.solve_seconds is None else f", solved in {plan.solve_seconds:.1f} s"
    table.add_row("solver", plan.solver, f"backend {plan.backend}, cost model {plan.cost_model}, "
                  f"device {plan.device}{seconds}")
    if plan.optimizer is not None:
        table.add_row("optimizer", plan.optimizer.name,
                      f"state {format_bytes(plan.optimizer.state_bytes)}, temporaries of its step "
                      f"{format_bytes(plan.optimizer.step_peak_bytes)}")
    return table


def _layers(plan: Plan) -> Table:
    table = new_table("module", ">modules", ">recomputed", ">kept", ">freed", ">paid",
                      fold="module")

    def add(name: str, count: int, totals: Totals) -> None:
        table.add_row(name, str(count), f"{totals.recomputed_ops} of {totals.ops}",
                      format_bytes(totals.saved_bytes), format_bytes(totals.freed_bytes),
                      format_flops(totals.recompute_flops))

    rows = layer_rows(plan.decisions)
    for row in rows:
        add(row.module or "(model)", row.count, row.totals)
    if rows:
        table.add_section()
        add("total", sum(row.count for row in rows), sum((row.totals for row in rows), Totals()))
    return table


def _kernels(plan: Plan) -> list[RenderableType]:
    if not plan.kernels:
        return []
    table = new_table("kernel", "module", ">ops", "rule", fold="rule")
    for each in plan.kernels:
        table.add_row(each.kernel, each.modules, str(each.count or "-"), each.rule)
    return [title("Kernels of the GPU planned for"), table]


def _share(size_bytes: int, plan: Plan) -> str:
    if not plan.baseline_peak_bytes:
        return "-"
    return f"{size_bytes / plan.baseline_peak_bytes:.1%}"


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


_READABLE_ROWS = 48


@dataclass(frozen=True, slots=True)
class Totals:
    """Summed decisions for the ops of one module, or of several with equal decisions."""

    ops: int = 0
    recomputed_ops: int = 0
    """Number of these that run again."""
    saved_bytes: int = 0
    """Kept from forward to backward under the plan."""
    plain_saved_bytes: int = 0
    """The same without recomputation."""
    recompute_flops: int = 0

    @property
    def freed_bytes(self) -> int:
        """Bytes that the plan no longer keeps; below 0 if it keeps more here so that others keep
        less."""
        return self.plain_saved_bytes - self.saved_bytes

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.ops + other.ops, self.recomputed_ops + other.recomputed_ops,
                      self.saved_bytes + other.saved_bytes,
                      self.plain_saved_bytes + other.plain_saved_bytes,
                      self.recompute_flops + other.recompute_flops)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One row of the table of modules."""

    module: str
    """Path, with numbers of equal layers as ranges: `h.0-4,7.attn`; empty for the root."""
    count: int
    """Number of modules in the row."""
    totals: Totals
    """Sums over these modules."""


def layer_rows(decisions: Iterable[Decision]) -> tuple[LayerRow, ...]:
    """The rows in the order in which modules first run."""
    by_module: dict[str, Totals] = {}
    for decision in decisions:
        by_module[decision.module] = by_module.get(decision.module, Totals()) + Totals(
            1, int(decision.recomputations > 0), decision.saved_bytes, decision.plain_saved_bytes,
            decision.flops * decision.recomputations)
    modules = {tuple(name.split(".")): totals for name, totals in by_module.items()}
    rows: tuple[LayerRow, ...] = ()
    for depth in range(max((len(path) for path in modules), default=0), 0, -1):
        rows = _fold(_cut(modules, depth))
        if len(rows) <= _READABLE_ROWS:
            break
    return rows


def _cut(modules: dict[tuple[str, ...], Totals], depth: int) -> dict[tuple[str, ...], Totals]:
    """Modules summed at a depth of at most `depth` names."""
    cut: dict[tuple[str, ...], Totals] = {}
    for path, totals in modules.items():
        cut[path[:depth]] = cut.get(path[:depth], Totals()) + totals
    return cut


def _fold(modules: dict[tuple[str, ...], Totals]) -> tuple[LayerRow, ...]:
    """Merge modules that differ in one number only and have equal decisions."""
    rows = [(path, 1, totals) for path, totals in modules.items()]
    for place in range(max((len(path) for path in modules), default=0) - 1, -1, -1):
        groups: dict[tuple[tuple[str, ...], bool, int, Totals], list[int]] = {}
        for position, (path, count, each) in enumerate(rows):
            numbered = place < len(path) and path[place].isdecimal()
            blank = (*path[:place], "*", *path[place + 1:]) if numbered else path
            groups.setdefault((blank, numbered, count, each), []).append(position)
        folded = []
        for (path, numbered, count, each), members in groups.items():
            if numbered:
                span = _ranges([int(rows[m][0][place]) for m in members])
                path = (*path[:place], span, *path[place + 1:])
            folded.append((path, count * len(members), each))
        rows = folded
    return tuple(LayerRow(".".join(path), count, sum([each] * count, Totals()))
                 for path, count, each in rows)


def _ranges(numbers: Sequence[int]) -> str:
    """Format `[0, 1, 2, 5]` as `0-2,5`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
