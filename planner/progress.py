"""Progress of long planning: one line on a terminal, two log lines elsewhere.

On a terminal, a line on stderr shows the current work and its duration from the start.  Elsewhere
the log `planner.progress` gets a line (level INFO) after one second, and one at the end.  Without
logging handlers, they go to stderr.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO

from planner._graph_capture.progress import Progress as Progress

log = logging.getLogger("planner.progress")

_SECONDS = 1.0
"""Interval between updates of the line, and delay of the first log line."""


class Watch:
    """Receiver of progress reports on one piece of long work; mutable."""

    def __init__(self, what: str, progress: Progress | None, stream: TextIO | None) -> None:
        """`progress`: a callback that receives the reports instead; `stream`: a terminal."""
        self._what, self._progress, self._stream = what, progress, stream
        self._message, self._result, self._is_told = what, "", False
        self._started = time.monotonic()
        self._ended, self._lock = threading.Event(), threading.Lock()

    def __call__(self, message: str) -> None:
        """Report the current work, in one line."""
        self._message = message
        if self._progress is not None:
            self._progress(message)
        elif self._stream is not None:
            self._draw()

    def conclude(self, result: str) -> None:
        """Set the text that the last line ends with."""
        self._result = result

    def begin(self) -> None:
        """Show the line and keep it up to date."""
        if self._progress is None:
            if self._stream is not None:
                self._draw()
            threading.Thread(target=self._tick, daemon=True, name="planner.progress").start()

    def end(self, error: BaseException | None = None) -> None:
        """Remove the line, or log the end."""
        with self._lock:
            self._ended.set()
            if self._stream is not None:
                _write(self._stream, "")
            is_told = self._is_told
        if is_told:
            seconds = f"{time.monotonic() - self._started:.1f} s"
            _announce(f"the planner finished {self._what} after {seconds}{self._result}"
                      if error is None else
                      f"the planner stopped {self._what} after {seconds}: {type(error).__name__}")

    def _tick(self) -> None:
        while not self._ended.wait(_SECONDS):
            if self._stream is not None:
                self._draw()
                continue
            with self._lock:
                if not self._ended.is_set():
                    self._is_told = True
                    _announce(f"the planner is {self._what}")
            return

    def _draw(self) -> None:
        assert self._stream is not None
        width = shutil.get_terminal_size().columns - 1
        text = f"[{time.monotonic() - self._started:5.1f} s] {self._message}".replace("\n", " ")
        with self._lock:
            if not self._ended.is_set():
                _write(self._stream, text[:width])


_current: ContextVar[Watch | None] = ContextVar("_current", default=None)


@contextmanager
def watched(progress: Progress | None, what: str = "", *, logs: bool = True) -> Iterator[Watch]:
    """Context whose reports go to `progress`, else to the active watch, else to a line on stderr
    or, if it `logs`, the log.  `what`: the work, as in "the planner is planning a step"."""
    known = _current.get()
    if progress is None and known is not None:
        if what:
            known(what)
        yield known
        return
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    watch = Watch(what, progress, sys.stderr if is_terminal else None)
    token = _current.set(watch)
    if is_terminal or logs:
        watch.begin()
    try:
        yield watch
    except BaseException as error:
        watch.end(error)
        raise
    else:
        watch.end()
    finally:
        _current.reset(token)


def active() -> Progress | None:
    """The active receiver of reports; `None` if there is none."""
    return _current.get()


def show_results() -> None:
    """Remove the line on the terminal before results are printed."""
    watch = _current.get()
    if watch is not None:
        watch.end()


def _write(stream: TextIO, text: str) -> None:
    """Replace the line on a terminal."""
    with suppress(OSError, ValueError):  # the terminal is closed
        stream.write("\r\x1b[2K" + text)
        stream.flush()


def _announce(message: str) -> None:
    if log.hasHandlers():
        log.info("%s", message)
        return
    # Python alone would print warnings only.  Levels that the user has raised are respected.
    is_wanted = (log.getEffectiveLevel() <= logging.WARNING
                 and logging.root.manager.disable < logging.INFO)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if is_wanted and is_first_rank and sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"planner: {message}", file=sys.stderr, flush=True)
