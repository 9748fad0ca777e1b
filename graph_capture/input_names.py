"""Stable names for the inputs of a captured region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def region_input_names(inputs: Sequence[object], names: Mapping[int, str]) -> list[str]:
    """Parameters and buffers by their qualified name, other inputs numbered in order.

    `names` maps the identity of a tensor to its name.
    """
    found, others = [], 0
    for tensor in inputs:
        name = names.get(id(tensor))
        if name is None:
            name = f"input:{others}"
            others += 1
        found.append(name)
    return found
