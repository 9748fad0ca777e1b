"""What goes to stdout, tables for people and JSON for programs, and what is written to files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

from planner.cli.failures import UsageError
from planner.progress import show_results

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

    stream = _results.get()
    if stream.isatty():
        show_results()
        with _as_errors_of_stdout():
            Console(file=stream, highlight=False, markup=False, emoji=False).print(report)
            stream.flush()
    else:
        text = plain_text(report)
        if not _can_print(text):
            text = text.translate(_IN_ASCII)
        _print(text)


def print_json(document: dict[str, Any]) -> None:
    """One document; keys in their order, text as it is where stdout's encoding has it."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)
    if not _can_print(text):
        text = json.dumps(document, allow_nan=False, indent=2)
    _print(text)


@contextmanager
def results_apart() -> Iterator[None]:
    """Inside, results alone go to stdout; what the user's code prints goes to stderr."""
    token = _results.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results.reset(token)


_results: ContextVar[TextIO] = ContextVar("_results")
_IN_ASCII = str.maketrans({"─": "-", "…": "...", "×": "x"})


def _can_print(text: str) -> bool:
    try:
        text.encode(_results.get().encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _print(text: str) -> None:
    show_results()
    with _as_errors_of_stdout():
        print(text, file=_results.get(), flush=True)


@contextmanager
def _as_errors_of_stdout() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from None


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


def check_plot(path: Path | None) -> None:
    """The same for a figure."""
    from planner.reporters.figures import check_format

    check_writable(path)
    if path is not None:
        check_format(path)
