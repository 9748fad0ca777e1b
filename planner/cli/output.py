"""What goes to stdout, tables for people and JSON for programs, and what is written to files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from planner.cli.failures import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType


class Documented(Protocol):
    """What can be printed for programs."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        ...


R = TypeVar("R", bound=Documented)


def print_result(result: R, report: Callable[[R], RenderableType], *, json: bool) -> None:
    """One result, as JSON or by its reporter."""
    if json:
        print_json(result.to_dict())
    else:
        print_report(report(result))


def print_report(report: RenderableType) -> None:
    """In colour and to its width on a terminal, as plain text of a fixed width elsewhere."""
    from rich.console import Console

    from planner.reporters.table import plain_text

    if sys.stdout.isatty():
        Console(highlight=False, markup=False, emoji=False).print(report)
    else:
        print(plain_text(report))


def print_json(document: dict[str, Any]) -> None:
    """One document; keys in their order, text as it is."""
    print(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2))


def check_writable(path: Path | None) -> None:
    """Raise before the work, not after it, where a result could not be written; `None`: nothing is
    to be."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    if not folder.is_dir():
        raise FileNotFoundError(2, "there is no such folder to write to", str(folder))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(13, "not allowed to write here", str(path))
