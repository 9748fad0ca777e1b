"""Arguments whose containers belong to one call.

A model may write into what it is called with: add entries to a dictionary, set attributes of a
batch.  Each call gets containers and objects of its own, with the same tensors in them.

Blind spot: objects that cannot be copied are shared by all calls.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planner._graph_capture.torch_compat import pytree


def in_own_containers(model: nn.Module, tree: Any) -> Any:
    """The same arguments of a call of `model`, in containers of their own."""
    memo: dict[int, Any] = {
        id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())}
    return pytree.tree_map(lambda leaf: _copied(leaf, memo), tree)


def _copied(leaf: Any, memo: dict[int, Any]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf
    try:
        with _SameTensors():
            return copy.deepcopy(leaf, memo)
    except Exception:  # an object that cannot be copied
        return leaf


class _SameTensors(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return args[0]
        return func(*args, **(kwargs or {}))
