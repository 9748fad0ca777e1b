"""The inputs of one training step: positional, by keyword, or a single tensor.

Blind spot: values are not checked against the model's signature here; capture does so by calling
the model on fake tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

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
