"""Which file of a traceback is the user's: neither torch's nor of this package."""

from __future__ import annotations

from pathlib import PurePath

_HERE = PurePath(__file__).parent


def is_user_code(path: str) -> bool:
    """Whether a source file is outside of torch and of this package."""
    file = PurePath(path)
    return "torch" not in file.parts and not file.is_relative_to(_HERE)
