"""The inputs of one training step: positional, by keyword, or a single tensor; and the names of
their sizes that vary.

Blind spot: values are not checked against the model's signature here; capture does so by calling
the model on fake tensors.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from planner.arguments.planning import Dynamic

_EXPECTED = ("a tuple of positional arguments, a mapping of keyword arguments, or one tensor "
             "(the only argument)")


def split_inputs(model: nn.Module, inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of `model` for one step.

    `None` stands for `model.example_input_array` (Lightning), else `model.dummy_inputs` (Hugging
    Face).  Raises `TypeError` for any other type and `ValueError` if there are no inputs.
    """
    if inputs is None:
        inputs = _own_example(model)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        strays = [key for key in inputs if not isinstance(key, str)]
        if strays:
            raise TypeError("inputs given as a mapping need text as keys (the names of the "
                            f"model's arguments), got {strays[0]!r}")
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    remedy = "; make the list a tuple" if isinstance(inputs, list) else ""
    raise TypeError(f"inputs must be {_EXPECTED}, got {type(inputs).__name__}{remedy}")


def join_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | dict[str, Any]:
    """The inverse of `split_inputs`; mixed arguments become a mapping, positional ones by their
    names."""
    if not kwargs:
        return args
    if not args:
        return kwargs
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    named = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    return named


def _own_example(model: nn.Module) -> object:
    for attribute in ("example_input_array", "dummy_inputs"):
        example = getattr(model, attribute, None)
        if example is not None:
            return example
    raise ValueError(f"{type(model).__name__} has neither example_input_array nor dummy_inputs: "
                     f"pass inputs, {_EXPECTED}")


def describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Shapes, dtypes and plain values of a step's inputs, as JSON values."""
    return {"args": [_describe(value) for value in args],
            "kwargs": {name: _describe(value) for name, value in kwargs.items()}}


def _describe(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {str(key): _describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_describe(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return {"type": type(value).__qualname__}


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
