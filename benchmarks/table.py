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
    """Format of a number, as for `format`; empty: unformatted."""

    def cell(self, value: object) -> str:
        text = "" if value is None else (
            format(value, self.kind) if self.kind and not isinstance(value, str) else str(value))
        return text.rjust(self.width) if self.right else text.ljust(self.width)


class Table:
    """Prints its head on creation, and each row as it is given.

    A column is its heading and, after a colon, the format of its values: `"peak MB:8.2f"`.
    Formatted numbers are aligned right, anything else left unless `>` is given.  Text is printed as
    it is, and `None` as nothing.
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
