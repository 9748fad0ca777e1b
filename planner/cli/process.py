"""The process around a command: its streams, Ctrl-C, its exit code.

Only results go to stdout, so that programs can read them.  All other output, including that of the
user's code and of C libraries, goes to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress

from planner.cli.interrupts import INTERRUPTED, INTERRUPTS


def main() -> None:
    """Entry point of `checkpoint-planner`."""
    INTERRUPTS.install()
    try:
        code = run(sys.argv[1:]) if _open_streams() else 1
    except KeyboardInterrupt:  # before or after the command
        INTERRUPTS.say()
        code = INTERRUPTED
    _flush_streams()
    exec("")  # resets Python's interrupt state, or it would exit by a signal
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command within this process; return its exit code."""
    try:
        from planner.cli.commands import NAME, commands
    except KeyboardInterrupt:
        INTERRUPTS.say()
        return INTERRUPTED
    from planner.cli.failures import ExitCode, report

    try:
        if not arguments:
            with redirect_stdout(sys.stderr):
                commands()(["--help"], NAME, standalone_mode=False)
            return ExitCode.USAGE
        code: int | None = commands()([*arguments], NAME, standalone_mode=False)
        if not code:
            sys.stdout.flush()
    except BaseException as error:
        code = report(error)
    if INTERRUPTS.is_ending:  # even if the KeyboardInterrupt was swallowed
        INTERRUPTS.say()
        return INTERRUPTED
    return ExitCode.DONE if code is None else code


def _open_streams() -> bool:
    """Give results their own stream and redirect file descriptor 1 to stderr; return `False` if
    stdout is closed."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # else the next opened file would get this number
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        print("error: stdout is closed: there is nowhere to print the results", file=sys.stderr)
        return False
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(results, "w", encoding=sys.stdout.encoding,  # noqa: SIM115
                      errors="backslashreplace")
    return True


def _flush_streams() -> None:
    """Flush; drop unwritable output, which Python would report at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
