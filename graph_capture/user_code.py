"""Detects the user's files in a traceback: neither torch's nor this package's."""

from __future__ import annotations

import sys
import traceback
from functools import cache
from pathlib import PurePath
from types import FrameType

_HERE = PurePath(__file__).parent


@cache
def is_user_code(path: str) -> bool:
    """True if a source file is outside of torch and of this package."""
    file = PurePath(path)
    return "torch" not in file.parts and not file.is_relative_to(_HERE)


def running_place() -> tuple[str, int] | None:
    """File and line of the user's code that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def place_of(error: BaseException) -> str:
    """The place in the user's code of an error's traceback, to append to a text: ` at model.py:12
    (`x.item()`)`; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if is_user_code(frame.filename)]
    if not frames:
        return ""
    line = f" (`{frames[-1].line}`)" if frames[-1].line else ""
    return f" at {PurePath(frames[-1].filename).name}:{frames[-1].lineno}{line}"
