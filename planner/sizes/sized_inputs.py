"""Inputs of another size: one dimension of given inputs, varied.

The model of the world: a batch is the first dimension that tensors of the inputs share; a sequence
length is the second one, and in tensors that are not floating point (tokens, labels, masks) any
later dimension of that length.  Values are repeated or left out.

Blind spot: a dimension that happens to have the same size.  A factory says what is meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from planner.arguments.inputs import join_inputs, split_inputs
from planner.sizes.sized_steps import MakeInputs

if TYPE_CHECKING:
    import torch
    from torch import nn


def model_first(model: Any, inputs: Any) -> tuple[nn.Module, Any]:
    """The two arguments with the model first; the order (factory, model) is taken, too."""
    from torch import nn

    if isinstance(inputs, nn.Module) and not isinstance(model, nn.Module):
        model, inputs = inputs, model
    return model, inputs


def factory_of(model: nn.Module, inputs: object, what: str) -> MakeInputs:
    """A function from a size to inputs: `inputs` if it is one, else `inputs` with another `batch`
    or `sequence` (`what`).

    Raises `TypeError` if `inputs` is neither, and `ValueError` if no tensor has the dimension.
    """
    import torch

    from planner._graph_capture.torch_compat import pytree

    if callable(inputs) and not isinstance(inputs, (torch.Tensor, Mapping)):
        return cast(MakeInputs, inputs)
    try:
        args, kwargs = split_inputs(model, inputs)
    except TypeError as error:
        raise TypeError(f"{error}; or a function from a {what} size to inputs") from None
    first = 0 if what == "batch" else 1
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs))
               if isinstance(leaf, torch.Tensor) and leaf.dim() > first]
    if not tensors:
        raise ValueError(f"no tensor of the inputs has a dimension {first}, which would be the "
                         f"{what}; pass a function from a {what} size to inputs")
    size = tensors[0].size(first)

    def resized(value: object, to: int) -> object:
        if not isinstance(value, torch.Tensor) or value.dim() <= first:
            return value
        last = value.dim() if first and not value.is_floating_point() else first + 1
        for dimension in range(first, last):
            if value.size(dimension) == size:
                value = _with_size(value, dimension, to)
        return value

    def make_inputs(to: int) -> object:
        made = pytree.tree_map(lambda leaf: resized(leaf, to), (args, kwargs))
        return join_inputs(model, *made)

    return make_inputs


def _with_size(tensor: torch.Tensor, dimension: int, size: int) -> torch.Tensor:
    import torch

    positions = torch.arange(size, device=tensor.device) % max(1, tensor.size(dimension))
    return tensor.detach().index_select(dimension, positions).requires_grad_(tensor.requires_grad)
