"""Which sizes of a step's inputs vary, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from planner.arguments.planning import Dynamic


def named_dimensions(dynamic: Dynamic, tensors: Mapping[str, torch.Tensor]
                     ) -> dict[str, dict[int, str]]:
    """Names of sizes by input and dimension; `tensors`: those of the call, by name.

    `True` names every dimension (`input_ids_0`); the same dimensions of several inputs have one
    name where they are equal.  Raises `ValueError` for an input or a dimension that the call has
    not, and for a name of two sizes.
    """
    if isinstance(dynamic, Mapping):
        return _with_same_tensors(_checked(dynamic, tensors), tensors)
    if not dynamic:
        return {}
    names: dict[tuple[int, int], str] = {}
    return {name: {place: names.setdefault((place, size), size_name(name, place))
                   for place, size in enumerate(tensor.shape) if size > 1}
            for name, tensor in tensors.items()}


def size_name(name: str, place: int) -> str:
    """Name of the size of a dimension that the user has not named."""
    return f"{re.sub(r'[^0-9a-zA-Z]+', '_', name)}_{place}"


def _checked(dynamic: Mapping[str, Mapping[int, str]], tensors: Mapping[str, torch.Tensor]
             ) -> dict[str, dict[int, str]]:
    sizes: dict[str, tuple[int, str]] = {}
    for name, places in dynamic.items():
        if name not in tensors:
            raise ValueError(f"dynamic names the input {name!r}, and the tensors among the inputs "
                             f"are {', '.join(map(repr, tensors)) or 'none'}")
        for place, size in places.items():
            where = f"dimension {place} of {name!r}"
            if place >= tensors[name].dim():
                raise ValueError(f"dynamic names {where}, which has {tensors[name].dim()}")
            number = tensors[name].size(place)
            if number < 2:
                raise ValueError(f"{size} is {number} ({where}), which torch.compile captures by "
                                 "itself: give inputs of the largest size that is to be served")
            known, first = sizes.setdefault(size, (number, where))
            if known != number:
                raise ValueError(f"{size} is {known} ({first}) and {number} ({where}); give "
                                 "different sizes different names")
    return {name: dict(places) for name, places in dynamic.items()}


def _with_same_tensors(named: dict[str, dict[int, str]], tensors: Mapping[str, torch.Tensor]
                       ) -> dict[str, dict[int, str]]:
    """The same names for an input that is the very same tensor as a named one."""
    found = dict(named)
    for name, places in named.items():
        for other, tensor in tensors.items():
            if tensor is tensors[name] and other not in found:
                found[other] = places
    return found
