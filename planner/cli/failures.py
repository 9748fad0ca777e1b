"""Errors at the command line: one line on stderr and an exit code, no traceback for a mistake.

Exit codes: 0 done, 1 error, 2 usage, 3 infeasible budget, 4 the plan does not match the model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer

from planner.errors import InfeasibleBudget, PlanMismatch, PlannerError


class ExitCode(IntEnum):
    """What the process reports to the shell."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    INFEASIBLE_BUDGET = 3
    PLAN_MISMATCH = 4


class UsageError(Exception):
    """An argument of the command line is wrong."""


class TargetError(Exception):
    """The model named on the command line could not be made."""


@contextmanager
def reported() -> Iterator[None]:
    """Turn what the planner raises into a message and an exit code."""
    try:
        yield
    except InfeasibleBudget as error:
        _fail(error, ExitCode.INFEASIBLE_BUDGET)
    except PlanMismatch as error:
        _fail(error, ExitCode.PLAN_MISMATCH)
    except (PlannerError, TargetError, ImportError) as error:
        _fail(error, ExitCode.ERROR)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else error, ExitCode.ERROR)
    except (UsageError, TypeError, ValueError) as error:
        _fail(error, ExitCode.USAGE)
    except KeyboardInterrupt:
        _fail("interrupted", ExitCode.ERROR)


def _fail(message: object, code: ExitCode) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(int(code))
