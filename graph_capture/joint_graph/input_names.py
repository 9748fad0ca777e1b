"""Stable names for the inputs of a captured region."""

from __future__ import annotations

from collections.abc import Sequence


def region_input_names(known: Sequence[str | None]) -> list[str]:
    """Parameters and buffers by their qualified name, other inputs (`None`) numbered in order."""
    found, others = [], 0
    for name in known:
        if name is None:
            name = f"input:{others}"
            others += 1
        found.append(name)
    return found
