"""Decisions per op, summed by module, with repeated layers folded into one row.

Layers with equal decisions differ only in a number in their path; they become one row,
`h.0-11.attn`.  Layers with other decisions get their own rows.  If that gives too many rows,
modules are summed at a smaller depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.plans.decisions import Decision

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
    rows = [(path, 1, totals, totals) for path, totals in modules.items()]
    for place in range(max((len(path) for path in modules), default=0) - 1, -1, -1):
        groups: dict[tuple[tuple[str, ...], bool, int, Totals], list[int]] = {}
        for position, (path, count, each, _) in enumerate(rows):
            numbered = place < len(path) and path[place].isdecimal()
            blank = (*path[:place], "*", *path[place + 1:]) if numbered else path
            groups.setdefault((blank, numbered, count, each), []).append(position)
        folded = []
        for (path, numbered, count, each), members in groups.items():
            if numbered:
                span = _ranges([int(rows[m][0][place]) for m in members])
                path = (*path[:place], span, *path[place + 1:])
            totals = Totals()
            for member in members:
                totals += rows[member][3]
            folded.append((path, count * len(members), each, totals))
        rows = folded
    return tuple(LayerRow(".".join(path), count, totals) for path, count, _, totals in rows)


def _ranges(numbers: Sequence[int]) -> str:
    """Format `[0, 1, 2, 5]` as `0-2,5`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
