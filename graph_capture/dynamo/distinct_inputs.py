"""Call inputs for which Dynamo makes one graph, no matter which of them are the same tensor.

Dynamo gives one placeholder to a tensor that is passed twice (`labels=input_ids`), and two to two
tensors: two graphs for one computation.  So every occurrence becomes a tensor object of its own
over the same memory.

Blind spot: tensors in objects that are no pytree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from planner._graph_capture.torch_compat import pytree


def with_distinct_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]
                          ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with each repeated tensor replaced by a new tensor object over the same
    memory; gradients flow through it as through the first."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    seen: set[int] = set()
    changed = False
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if id(leaf) in seen:
            leaves[index] = leaf.view_as(leaf) if leaf.requires_grad else leaf.detach()
            changed = True
        seen.add(id(leaf))
    return pytree.tree_unflatten(leaves, structure) if changed else (args, dict(kwargs))
