"""Results on stdout, as tables for people or JSON for programs; errors as one line on stderr and an
exit code, without a traceback for user errors; and checks of output files."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from planner.errors import InfeasibleBudget, PlanMismatch, PlannerError
from planner.progress import show_results

if TYPE_CHECKING:
    from rich.console import RenderableType


class ExitCode(IntEnum):
    """Exit codes of the process."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    INFEASIBLE_BUDGET = 3
    PLAN_MISMATCH = 4
    INTERRUPTED = 130
    """By Ctrl-C; as shells report it."""


class UsageError(Exception):
    """An argument of the command line is invalid."""


class TargetError(Exception):
    """The model named on the command line could not be created."""


@contextmanager
def reported() -> Iterator[None]:
    """Convert errors of the planner and of the user's code to a message and an exit code."""
    try:
        yield
    except typer.Exit:
        raise
    except BaseException as error:
        raise typer.Exit(report(error)) from None


def report(error: BaseException) -> int:
    """Print an error in one line on stderr; return the exit code."""
    message, code = _explained(error)
    with suppress(OSError):  # stderr is closed
        print(f"error: {_in_one_line(message)}", file=sys.stderr, flush=True)
    return code


def _explained(error: BaseException) -> tuple[str, ExitCode]:
    match error:
        case KeyboardInterrupt() | typer.Abort():
            return "interrupted", ExitCode.INTERRUPTED
        case InfeasibleBudget():
            return str(error), ExitCode.INFEASIBLE_BUDGET
        case PlanMismatch():
            return str(error), ExitCode.PLAN_MISMATCH
        case PlannerError() | TargetError() | ImportError():
            return str(error), ExitCode.ERROR
        case OSError() if error.strerror:
            place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
            return place + error.strerror, ExitCode.ERROR
        case SystemExit():
            return f"the model's code ended the program: {describe_error(error)}", ExitCode.ERROR
        case UsageError() | TypeError() | ValueError():
            return str(error), ExitCode.USAGE
    if hasattr(error, "format_message"):  # of Typer, which does not export the class
        return _usage(error), ExitCode.USAGE
    return describe_error(error), ExitCode.ERROR


def _usage(error: Any) -> str:
    """Message of an argument error raised by Typer."""
    command = "checkpoint-planner" if error.ctx is None else error.ctx.command_path
    return f"{error.format_message().rstrip('.')}; `{command} --help` lists what there is"


def describe_error(error: BaseException) -> str:
    """Type, text and location of an error in the user's code."""
    try:
        text = str(error)
    except Exception:
        text = "(without a text)"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename
           and not frame.filename.startswith("<frozen")
           and os.path.dirname(__file__) not in frame.filename
           and os.sep + "importlib" + os.sep not in frame.filename]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}{place}"


def _in_one_line(text: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1]
                   for each in " ".join(text.split()))


def print_result(result: Any, report: Callable[[Any], RenderableType], *, json: bool) -> None:
    """Print one result, as JSON by its `to_dict()`, or by its reporter."""
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
