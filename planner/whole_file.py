"""Atomic writing of files.

A regular file is written next to its destination and moved into place: readers see the old content
or the new.  The destination is the target of a symbolic link, and keeps its mode.  A device or a
pipe is written to directly.

A draft is locked by its writer.  A draft without a lock was left behind by a killed process, and
the next writer to the same destination removes it.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import stat
from os import PathLike
from pathlib import Path
from typing import BinaryIO

_LONGEST_NAME = 255
_ENDING = ".{}.tmp"
_DIGITS = 8


def write_whole(path: str | PathLike[str], content: bytes) -> None:
    """Write `content` to `path` atomically; an existing file is replaced.

    Raises `OSError` if the path cannot be written.
    """
    try:
        mode = _mode_of(path)
        if mode is None or stat.S_ISREG(mode):
            _replace(Path(os.path.realpath(path)), content, mode)
            return
        with Path(path).open("wb") as stream:  # raises for a folder
            stream.write(content)
    except OSError as error:
        # The caller knows the destination, not the draft.
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None


def _mode_of(path: str | PathLike[str]) -> int | None:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _replace(destination: Path, content: bytes, mode: int | None) -> None:
    """Write a draft with this mode and move it to the destination."""
    headroom = _LONGEST_NAME - len(_ENDING.format("0" * _DIGITS)) - 1
    stem = "." + os.fsencode(destination.name)[:headroom].decode(errors="ignore")
    draft, stream = _locked_draft(destination.parent, stem)
    try:
        with stream:
            if mode is not None:
                os.fchmod(stream.fileno(), stat.S_IMODE(mode))
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            draft.replace(destination)
    finally:
        draft.unlink(missing_ok=True)
    _remove_abandoned(destination.parent, stem)


def _locked_draft(folder: Path, stem: str) -> tuple[Path, BinaryIO]:
    while True:
        draft = folder / (stem + _ENDING.format(secrets.token_hex(_DIGITS // 2)))
        stream = draft.open("xb")
        fcntl.flock(stream, fcntl.LOCK_EX)
        if draft.exists():  # no other process removed it before the lock
            return draft, stream
        stream.close()


def _remove_abandoned(folder: Path, stem: str) -> None:
    for draft in folder.glob(glob.escape(stem) + _ENDING.format("[0-9a-f]" * _DIGITS)):
        try:
            with draft.open("rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()
        except OSError:  # it is locked, gone, or another user's
            continue
