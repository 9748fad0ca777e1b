"""The process around a command: its streams, Ctrl-C, its exit code.

Only results go to stdout, so that programs can read them.  All other output, including that of the
user's code and of C libraries, goes to stderr.

Ctrl-C ends the process at once, whatever code it arrives in.  Only the first one during the
solver's search is left to the search, which may return its best schedule so far.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from types import FrameType

_INTERRUPTED = 130
"""As `output.ExitCode`, which is imported only after Ctrl-C is handled."""


def main() -> None:
    """Entry point of `checkpoint-planner`."""
    _handle_interrupts()
    code = run(sys.argv[1:]) if _open_streams() else 1
    _flush_streams()
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # else Ctrl-C kills Python as it shuts down
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command within this process; return its exit code."""
    from planner.cli.commands import NAME, commands
    from planner.cli.output import ExitCode, report

    try:
        if not arguments:
            with redirect_stdout(sys.stderr):
                commands()(["--help"], NAME, standalone_mode=False)
            return ExitCode.USAGE
        code: int | None = commands()([*arguments], NAME, standalone_mode=False)
        if not code:
            sys.stdout.flush()
    except BaseException as error:
        return report(error)
    return ExitCode.DONE if code is None else code


def _handle_interrupts() -> None:
    presses = 0

    def handle(signal_number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses == 1 and _is_searching(frame):
            raise KeyboardInterrupt
        os.write(2, b"error: interrupted\n")
        os._exit(_INTERRUPTED)

    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, handle)


def _is_searching(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("planner.solvers."):
            return True
        frame = frame.f_back
    return False


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
