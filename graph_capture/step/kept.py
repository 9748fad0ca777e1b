"""The ops that the user wants kept, by patterns of module and op names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence


class Keeper:
    """The patterns, and those that have matched anything so far."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._used: set[str] = set()

    def __call__(self, module: str, target: str) -> bool:
        """True if an op of this module is to be kept."""
        hit = False
        for pattern in self._patterns:
            if _is_inside(module, pattern) or target == pattern or target.startswith(f"{pattern}."):
                self._used.add(pattern)
                hit = True
        return hit

    def check_all_used(self) -> None:
        """Raise `ValueError` for a pattern that matched nothing."""
        for pattern in self._patterns:
            if pattern not in self._used:
                raise ValueError(
                    f"keep={pattern!r} names no module and no op of the captured forward; give a "
                    "module name such as 'layers.3.attn' (wildcards allowed) or an op such as "
                    "'aten.topk'")


def _is_inside(module: str, pattern: str) -> bool:
    """True if a module, or one that contains it, matches."""
    parts = module.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:length]), pattern)
               for length in range(1, len(parts) + 1))
