"""What a training loop holds on the model's device at some moment.

Blind spot: on a CPU, what belongs neither to the model nor to an optimizer that was seen, batches
too; the allocator of a GPU counts all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from graph_capture.torch_compat import pytree, storage_key


def held_bytes(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> int:
    """Bytes of parameters, buffers, gradients and states of optimizers; on a GPU all that is
    allocated."""
    parameters = list(model.parameters())
    device = next((p.device for p in parameters), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    states = [value for each in optimizers for state in each.state.values()
              for value in state.values()]
    leaves = pytree.tree_leaves((parameters, [p.grad for p in parameters], list(model.buffers()),
                                 states))
    storages = {storage_key(leaf): leaf.untyped_storage().nbytes() for leaf in leaves
                if type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided}
    return sum(storages.values())
