"""The backward of a training step, from whatever the model returns.

The rule is that of `planner.plan`: the loss function where there is one, else the output's own
loss, else a scalar output, else a cotangent of ones for each differentiable output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def run_backward(output: object,
                 loss_fn: Callable[[Any], torch.Tensor] | None) -> tuple[torch.Tensor, ...]:
    """Accumulate the gradients of the step that returned `output`; returns the loss, or without
    one the outputs that the backward started from.

    Raises `ValueError` where nothing in the output needs a gradient.
    """
    roots = loss_roots(output, loss_fn)
    if not roots:
        raise ValueError("nothing in the model's output needs a gradient; is every parameter "
                         "frozen, or is gradient mode off?")
    cotangents = [None if root.dim() == 0 else torch.ones_like(root) for root in roots]
    torch.autograd.backward(roots, cotangents)
    return roots


def loss_roots(output: object,
               loss_fn: Callable[[Any], torch.Tensor] | None) -> tuple[torch.Tensor, ...]:
    """The tensors that the backward starts from."""
    if loss_fn is not None:
        return (loss_fn(output),)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return (own,)
    leaves = [leaf for leaf in pytree.tree_leaves(output)
              if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    scalars = [leaf for leaf in leaves if leaf.dim() == 0]
    return (scalars[0],) if scalars else tuple(leaves)
