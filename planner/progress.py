"""One line that says what a long planning run is doing, on a terminal and nowhere else."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from graph_capture.progress import Progress as Progress


@contextmanager
def watched(progress: Progress | None, stream: TextIO | None = None) -> Iterator[Progress]:
    """The callback to report to: the given one, else a line on stderr if that is a terminal."""
    stream = sys.stderr if stream is None else stream
    if progress is not None:
        yield progress
        return
    if not stream.isatty():
        yield _ignore
        return
    line = _TerminalLine(stream)
    try:
        yield line.show
    finally:
        line.clear()


class _TerminalLine:
    """A line that is written over; the time since the start stands in front."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()

    def show(self, message: str) -> None:
        """Replace the line."""
        width = shutil.get_terminal_size().columns - 1
        text = f"[{time.monotonic() - self._started:5.1f} s] {message}".replace("\n", " ")
        self._stream.write("\r\x1b[2K" + text[:width])
        self._stream.flush()

    def clear(self) -> None:
        """Remove the line."""
        self._stream.write("\r\x1b[2K")
        self._stream.flush()


def _ignore(message: str) -> None:
    """Nobody watches."""
