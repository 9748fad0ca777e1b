"""Command-line errors: one line on stderr and an exit code, no traceback for user errors."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any

import typer

from planner.errors import InfeasibleBudget, PlanMismatch, PlannerError


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
