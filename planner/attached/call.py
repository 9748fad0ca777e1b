"""The circumstances of one call of a model: all that decides which graph its step is.

Blind spots: arguments that are neither tensors nor plain values count by their type; what the
model's own attributes say does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graph_capture.torch_compat import pytree


@dataclass(frozen=True, slots=True)
class CallCircumstances:
    """What a model is called with, and as what."""

    arguments: tuple[tuple[str, object], ...]
    """By name: dtype, shape and whether a gradient is wanted, or the value."""
    training: bool
    trainable: tuple[bool, ...]
    """Of each parameter, in the order of `named_parameters()`."""
    autocast: str
    """Dtype of an active autocast; empty without."""

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
           ) -> CallCircumstances:
        """Those of the call `model(*args, **kwargs)`, made here and now."""
        leaves = [(_path(path), _described(leaf)) for path, leaf in
                  pytree.tree_leaves_with_path((args, dict(kwargs)))]
        device = next((p.device.type for p in model.parameters()), "cpu")
        return cls(tuple(sorted(leaves, key=lambda pair: pair[0])), model.training,
                   tuple(p.requires_grad for p in model.parameters()),
                   str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                   if torch.is_autocast_enabled(device) else "")

    def may_be_served_by(self, planned: CallCircumstances) -> bool:
        """Whether this may be the same graph with no tensor larger."""
        if (self.training, self.trainable, self.autocast) != (
                planned.training, planned.trainable, planned.autocast):
            return False
        if [name for name, _ in self.arguments] != [name for name, _ in planned.arguments]:
            return False
        return all(_is_no_larger(mine, theirs) for (_, mine), (_, theirs)
                   in zip(self.arguments, planned.arguments, strict=True))

    def difference_from(self, planned: CallCircumstances, model: nn.Module) -> str:
        """In words, what keeps a plan for another call from serving this one."""
        mine, theirs = dict(self.arguments), dict(planned.arguments)
        for name in mine.keys() - theirs.keys():
            return f"this call has {name}, which the planned one did not have"
        for name in theirs.keys() - mine.keys():
            return f"this call lacks {name}, which the planned one had"
        for name, value in mine.items():
            if not _is_no_larger(value, theirs[name]):
                return f"{name} is {_words(value)}, in the planned step {_words(theirs[name])}"
        if self.training != planned.training:
            return (f"the model is in {'train' if self.training else 'eval'} mode, the planned "
                    f"step was in {'train' if planned.training else 'eval'} mode")
        if self.autocast != planned.autocast:
            return (f"autocast is {self.autocast or 'off'}, in the planned step "
                    f"{planned.autocast or 'off'}")
        names = [name for name, _ in model.named_parameters()]
        for name, here, before in zip(names, self.trainable, planned.trainable, strict=False):
            if here != before:
                return (f"the parameter {name} is {'trained' if here else 'frozen'}, in the "
                        f"planned step it was {'trained' if before else 'frozen'}")
        return "the model's code takes another path"

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {_words(value)}" for name, value in self.arguments[:3])
        more = ", ..." if len(self.arguments) > 3 else ""
        cast = f", autocast {self.autocast}" if self.autocast else ""
        return f"{shown}{more}{cast}{'' if self.training else ', eval mode'}"


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    wants_gradient: bool


def _described(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return _Tensor(str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape),
                       leaf.requires_grad)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return repr(leaf)
    return type(leaf).__qualname__


def _is_no_larger(mine: object, planned: object) -> bool:
    if not (isinstance(mine, _Tensor) and isinstance(planned, _Tensor)):
        return mine == planned
    return (mine.dtype == planned.dtype and mine.wants_gradient == planned.wants_gradient
            and len(mine.shape) == len(planned.shape)
            and math.prod(mine.shape) <= math.prod(planned.shape))


def _words(value: object) -> str:
    if not isinstance(value, _Tensor):
        return str(value)
    return (f"{value.dtype}{list(value.shape)}"
            + (" with requires_grad" if value.wants_gradient else ""))


def _path(path: Any) -> str:
    """`args[0]`, or the name of a keyword argument and what is inside of it."""
    (which, *rest) = path
    inner = pytree.keystr(tuple(rest))
    if which.idx == 0:
        return f"argument {inner.strip('[]')}" if inner.count("[") == 1 else f"arguments{inner}"
    return inner.replace("['", "", 1).replace("']", "", 1)
