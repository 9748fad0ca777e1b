"""Ctrl-C handling: an interrupt ends the command, wherever it arrives.

The first Ctrl-C during the solver's search is left to the search, which may return its best
schedule so far.  Any other ends the command: Python raises `KeyboardInterrupt`, and if code
swallows it, the process exits a second later.  Destructors and C++ callbacks drop the exception,
too; then it is raised again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from _thread import interrupt_main
from contextlib import suppress
from types import FrameType, TracebackType

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it."""

_GRACE_SECONDS = 1.0
"""Time for the command to clean up."""

_PAUSE_SECONDS = 0.05


class Interrupts:
    """Handler of SIGINT; mutable."""

    def __init__(self) -> None:
        self.is_ending = False
        """True if the command is ending."""
        self._presses = 0
        self._is_said = self._is_installed = False

    def install(self) -> None:
        """Handle Ctrl-C in this process."""
        try:
            signal.signal(signal.SIGINT, self._handle)
        except ValueError:  # not the main thread
            return
        self._is_installed = True
        sys.unraisablehook = self._dropped
        sys.excepthook = self._dropped_by_c

    def say(self) -> None:
        """Print the one line, once; the process of a command ends soon after."""
        if self._is_installed:
            with suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._end_soon()
        if not self._is_said:
            self._is_said = self._is_installed
            with suppress(OSError):
                print("error: interrupted", file=sys.stderr, flush=True)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        self._presses += 1
        if self._presses > 1 or not _is_searching(frame):
            self._end_soon()
        raise KeyboardInterrupt

    def _end_soon(self) -> None:
        if not self.is_ending:
            self.is_ending = True
            threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        time.sleep(_GRACE_SECONDS)
        try:
            self.say()
        finally:
            os._exit(INTERRUPTED)

    def _dropped(self, unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Thread(target=self._raise_again, daemon=True).start()
        else:
            sys.__unraisablehook__(unraisable)

    def _dropped_by_c(self, kind: type[BaseException], error: BaseException,
                      trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            threading.Thread(target=self._raise_again, daemon=True).start()
        else:
            sys.__excepthook__(kind, error, trace)

    def _raise_again(self) -> None:
        time.sleep(_PAUSE_SECONDS)  # let the code that dropped it finish
        self._presses -= 1
        interrupt_main()


INTERRUPTS = Interrupts()


def _is_searching(frame: FrameType | None) -> bool:
    while frame is not None:
        if "solvers" in frame.f_globals.get("__name__", "").split("."):
            return True
        frame = frame.f_back
    return False
