"""Tables in markdown, printed row by row as they are measured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_SPECIFICATION = re.compile(r"([<>]?)(\+?)(\d*)(.*)")


class _Column(NamedTuple):
    width: int
    right: bool
    kind: str
    """How a number is printed, as for `format`; empty: as it is."""

    def cell(self, value: object) -> str:
        text = "" if value is None else (
            format(value, self.kind) if self.kind and not isinstance(value, str) else str(value))
        return text.rjust(self.width) if self.right else text.ljust(self.width)


class Table:
    """Prints its head when it is made, and each row when it is given.

    A column is its heading and, behind a colon, how its values are printed, as in format strings:
    `"peak MB:8.2f"`.  Where a kind of number is named they stand to the right, else to the left
    unless `>` says so.  Text is printed as it is, and `None` as nothing.
    """

    def __init__(self, *columns: str) -> None:
        self._columns: list[_Column] = []
        headings = []
        for column in columns:
            heading, _, specification = column.partition(":")
            found = _SPECIFICATION.fullmatch(specification)
            assert found is not None
            side, sign, width, kind = found.groups()
            self._columns.append(_Column(
                max(len(heading), int(width or 0)), side == ">" or bool(kind and side != "<"),
                sign + kind))
            headings.append(heading)
        self._print(column._replace(kind="").cell(heading)
                    for column, heading in zip(self._columns, headings, strict=True))
        print("|" + "|".join("-" * (column.width + 1) + ("-:"[column.right])
                             for column in self._columns) + "|", flush=True)

    def row(self, *values: object) -> None:
        """Print one row."""
        self._print(column.cell(value)
                    for column, value in zip(self._columns, values, strict=True))

    @staticmethod
    def _print(cells: Iterable[str]) -> None:
        print("| " + " | ".join(cells) + " |", flush=True)
