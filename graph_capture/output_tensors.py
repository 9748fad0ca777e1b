"""The tensors in a model's output, or among its arguments.

The model of the world: an output is a tensor, a container that `torch.utils._pytree` knows, or an
object that keeps its content in attributes: a dataclass, a distribution, an object of the user's
own class.  Containers, attributes and slots are searched, in their order.

Blind spots: tensors in closures, in objects of other languages, and those that a property makes
when it is read.  Modules, functions and classes are not searched.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from planner._graph_capture.torch_compat import pytree


def output_tensors(output: Any) -> list[torch.Tensor]:
    """Every tensor of a model's output, in order; one that occurs twice is listed twice."""
    found: list[torch.Tensor] = []
    _collect(output, found, set())
    return found


def with_changed_tensors(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """`output` with each of `output_tensors` changed; the objects that contain them are copied."""
    return pytree.tree_map(partial(_changed, change, {}), output)


# Nested functions that refer to themselves would keep the tensors alive until garbage is collected.
def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            for part in _parts(leaf).values():
                _collect(part, found, seen)


def _changed(change: Callable[[torch.Tensor], torch.Tensor], copies: dict[int, Any], leaf: Any
             ) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    if id(leaf) not in copies:
        copies[id(leaf)] = leaf
        if output_tensors(leaf):
            copies[id(leaf)] = made = copy.copy(leaf)
            for name, part in _parts(leaf).items():
                _put(made, name, pytree.tree_map(partial(_changed, change, copies), part))
    return copies[id(leaf)]


_OPAQUE = (nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
           types.MethodType, partial, Enum, torch.Generator)


def _parts(value: Any) -> dict[Any, Any]:
    """The content of an object by attribute, or of a container by key."""
    if isinstance(value, dict):  # of a class that pytree does not know
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, _OPAQUE):
        return {}
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__"))]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)},
            **getattr(value, "__dict__", {})}


def _names(slots: Any) -> tuple[str, ...]:
    names = (slots,) if isinstance(slots, str) else tuple(slots or ())
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _put(owner: Any, name: Any, part: Any) -> None:
    if isinstance(owner, (dict, list)):
        owner[name] = part
    elif name in getattr(owner, "__dict__", {}):
        vars(owner)[name] = part
    elif not isinstance(owner, tuple):
        object.__setattr__(owner, name, part)  # also where it is frozen
