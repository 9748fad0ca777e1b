"""What a training loop holds on the model's device at some moment.

The model of the world: on a GPU the allocator counts all.  On a CPU the tensors that Python knows
are looked through; what was there when `within` was called, and belongs to no model that it was
called for, is taken to be of the process and not of the loop.

Blind spots, on a CPU: what only autograd holds, as the saved tensors of another model, until the
tensors are seen as those of a loss; memory that belongs to no tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from planner._graph_capture.fake_copies.storage_less import is_storage_less
from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.torch_compat import pytree, storage_key

_PLAIN = (torch.Tensor, nn.Parameter)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def tensors_of(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> Iterator[torch.Tensor]:
    """Parameters, buffers, gradients, and states of optimizers."""
    parameters = list(model.parameters())
    states = [value for each in optimizers for state in each.state.values()
              for value in state.values()]
    for leaf in pytree.tree_leaves((parameters, [p.grad for p in parameters],
                                    list(model.buffers()), states)):
        if isinstance(leaf, torch.Tensor):
            yield from _parts(leaf)


def held_bytes(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> int:
    """Bytes of parameters, buffers, gradients and states of optimizers; on a GPU all that is
    allocated."""
    device = device_of(model)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _sum(tensors_of(model, optimizers), device)


class LoopMemory:
    """What the loop holds beside a model, from some moment on."""

    def __init__(self) -> None:
        self._before = WeakIdKeyDictionary()
        for tensor in _alive():
            self._before[tensor.untyped_storage()] = None

    def outside_bytes(self, device: torch.device, own: Iterable[torch.Tensor],
                     others: Iterable[torch.Tensor], pending_bytes: int) -> int:
        """Bytes beside the tensors `own`, and beside what calls hold whose backward is yet to come:
        `pending_bytes`.  `others`: what counts though it may have been there before."""
        parts = [part for tensor in own for part in _parts(tensor)]
        if device.type == "cuda":
            found_bytes = torch.cuda.memory_allocated(device) - _sum(parts, device)
        else:
            gc.collect()  # garbage of compiling is none of the loop's
            counted = {*map(storage_key, parts)}
            # What a compiled call saves has passed through Python.
            found_bytes = _sum((tensor for tensor in (*others, *self._made())
                                if storage_key(tensor) not in counted), device)
        return max(0, found_bytes - pending_bytes)

    def _made(self) -> Iterator[torch.Tensor]:
        return (tensor for tensor in _alive() if tensor.untyped_storage() not in self._before)


def _alive() -> Iterator[torch.Tensor]:
    """Every tensor that Python knows, and its gradient."""
    for found in gc.get_objects():
        if type(found) in _PLAIN and found.layout is torch.strided:
            gradient = found.grad if found.is_leaf else None
            yield from filter(_has_memory, [found] if gradient is None else [found, gradient])


def _has_memory(tensor: torch.Tensor) -> bool:
    return (type(tensor) in _PLAIN and tensor.layout is torch.strided
            and tensor.device.type != "meta" and not is_storage_less(tensor))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, or what a subclass is made of."""
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is not None:
        for name in names()[0]:
            yield from _parts(getattr(tensor, name))
    elif type(tensor) in _PLAIN and tensor.layout is torch.strided:
        yield tensor


def _sum(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    storages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors
                if tensor.device.type == device.type}
    return sum(allocated_bytes(size, device) for size in storages.values())
