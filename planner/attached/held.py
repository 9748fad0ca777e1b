"""Memory that a training loop keeps alive on the model's device at some moment.

Model of the world: on a GPU the allocator's counter includes everything.  On a CPU the tensors
known to Python are enumerated; tensors that existed when `within` was called, and belong to no
model that it was called for, are attributed to the process and not to the loop.

Blind spots, on a CPU: tensors that only autograd references, such as those saved by another model,
until they are observed as part of a loss; memory outside tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from planner._graph_capture.fake_copies.storage_less import is_storage_less
from planner._graph_capture.memory.allocator import allocated_bytes, requested_bytes
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.module_forward import modules_of, parameters_of
from planner._graph_capture.torch_compat import is_functional, storage_key

_PLAIN = (torch.Tensor, nn.Parameter)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """The gradients of the model's parameters, which `torch.func.functional_call` may replace by
    results, of which torch keeps none."""
    return gradients_among(parameters_of(modules_of(model)))


def gradients_among(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`gradients_of` the model that has these parameters."""
    return [gradient for parameter in parameters
            if parameter.is_leaf and (gradient := parameter.grad) is not None]


def tensors_of(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> list[torch.Tensor]:
    """The tensors of parameters, buffers, gradients and optimizer states."""
    states = [value for each in optimizers for state in each.state.values()
              for value in state.values()]
    return strided_tensors([*model.parameters(), *gradients_of(model), *model.buffers(), states])


def attributes_of(model: nn.Module, own: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that attributes of the modules refer to, but for parameters, buffers and `own`.
    """
    known = {*map(storage_key, strided_tensors([*own, *tensors_of(model)]))}
    attributes = [[*vars(module).values()] for module in model.modules()]
    return [tensor for tensor in strided_tensors(attributes)
            if storage_key(tensor) not in known and _has_memory(tensor)]


def held_bytes(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> int:
    """Bytes of parameters, buffers, gradients and optimizer states; on a GPU all requested bytes.
    """
    device = device_of(model)
    if device.type == "cuda":
        return requested_bytes(device)
    return bytes_on(device, tensors_of(model, optimizers))


_with_workspaces: set[torch.device] = set()


def _take_workspaces(device: torch.device) -> None:
    """Let torch allocate the workspaces of cuBLAS and cuBLASLt (`addmm`) that it keeps, for this
    thread and for that of the backward, before what is held is counted."""
    if device not in _with_workspaces:
        _with_workspaces.add(device)
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            matrix = torch.ones(64, 64, device=device, requires_grad=True)
            bias = torch.ones(64, device=device)
            product = torch.addmm(bias, matrix @ matrix, matrix)
            product.register_hook(lambda gradient: torch.addmm(bias, gradient, gradient))
            product.sum().backward()


class LoopMemory:
    """Memory that the loop keeps alive outside a model, counted from construction on."""

    def __init__(self) -> None:
        self._before = WeakIdKeyDictionary()
        for tensor in _alive():
            self._before[tensor.untyped_storage()] = None

    def outside_bytes(self, device: torch.device, own: Iterable[torch.Tensor],
                      others: Iterable[torch.Tensor], pending_bytes: int) -> int:
        """Bytes beside the tensors `own`, and beside what calls hold whose backward is yet to come:
        `pending_bytes`, which may include some of `own`.  `others`: what counts though it may have
        been there before."""
        parts = [*own]
        if device.type == "cuda":
            _take_workspaces(device)
            found_bytes = requested_bytes(device) - bytes_on(device, parts)
        else:
            gc.collect()  # garbage of compilation does not belong to the loop
            counted = {*map(storage_key, parts)}
            # What a compiled call saves has passed through Python.
            found_bytes = bytes_on(device, (tensor for tensor in (*others, *self.made())
                                            if storage_key(tensor) not in counted))
        return found_bytes - pending_bytes

    def existed(self, storage: torch.UntypedStorage) -> bool:
        """True if a storage was there before."""
        return storage in self._before

    def made(self) -> Iterator[torch.Tensor]:
        """Every tensor that Python knows, but for those from before."""
        return (tensor for tensor in _alive() if tensor.untyped_storage() not in self._before)


def _alive() -> Iterator[torch.Tensor]:
    """Every tensor known to Python, and its gradient."""
    for found in gc.get_objects():
        if type(found) in _PLAIN and found.layout is torch.strided:
            gradient = found.grad if found.is_leaf else None
            yield from filter(_has_memory, [found] if gradient is None else [found, gradient])


def _has_memory(tensor: torch.Tensor) -> bool:
    return (type(tensor) in _PLAIN and tensor.layout is torch.strided
            and tensor.device.type != "meta" and not is_functional(tensor)
            and not is_storage_less(tensor))


def bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors that are on a device, each storage once."""
    storages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors
                if tensor.device.type == device.type}
    return sum(allocated_bytes(size, device) for size in storages.values())
