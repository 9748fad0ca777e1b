"""Results on stdout, as tables for people or JSON for programs, and checks of output files."""

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
    """A result that can be printed as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        ...


R = TypeVar("R", bound=Documented)


def print_result(result: R, report: Callable[[R], RenderableType], *, json: bool) -> None:
    """Print one result, as JSON or by its reporter."""
    if json:
        print_json(result.to_dict())
    else:
        print_report(report(result))


def print_report(report: RenderableType) -> None:
    """Print in colour and at its width on a terminal, elsewhere as plain text of a fixed width."""
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
    """Print one document; keys keep their order, non-ASCII text is escaped only if stdout needs
    it."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)
    if not _can_print(text):
        text = json.dumps(document, allow_nan=False, indent=2)
    _print(text)


@contextmanager
def results_apart() -> Iterator[None]:
    """Context in which only results go to stdout; prints of the user's code go to stderr."""
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
    """Raise early if a result cannot be written to `path`; `None`: nothing will be written."""
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
    """Like `check_writable`, for a figure."""
    from planner.reporters.figures import check_format

    check_writable(path)
    if path is not None:
        check_format(path)
