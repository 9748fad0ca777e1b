"""Which file of a traceback is the user's: neither torch's nor of this package."""

from __future__ import annotations

from pathlib import Path

import torch

_OTHERS = (Path(torch.__file__).parent, Path(__file__).parent)


def is_user_code(path: str) -> bool:
    """Whether a source file lies outside of torch and of this package."""
    return not any(Path(path).is_relative_to(folder) for folder in _OTHERS)
