"""State that a call of a model changes in addition to gradients: random state, buffers, and
parameters that the model's code writes (the moving average of an encoder).

Blind spots: other state that the model's code changes (a counter of its own); parameters that only
a later call writes; those of `graph_capture.random_state`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from planner._graph_capture.random_state import remembered_random_state
from planner._graph_capture.torch_compat import storage_key

_PLAIN = (torch.Tensor, nn.Parameter)
_written = WeakKeyDictionary[nn.Module, set[str]]()
"""Names of the parameters that calls of a model were seen to write."""


class ModelState:
    """The state of a model when this object is made: random state, buffers, and parameters that
    calls are known to write."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (holder, name, tensor) for module in model.modules()
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items() if tensor is not None]
        self._data = [(tensor, tensor.data) for _, _, tensor in self._places
                      if type(tensor) in _PLAIN and tensor.layout is torch.strided]
        self._names = {storage_key(parameter): name for name, parameter in model.named_parameters()
                       if type(parameter) in _PLAIN and parameter.layout is torch.strided}
        self._values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._restore_random = remembered_random_state(model)
        for name, parameter in model.named_parameters():
            if name in _written.get(model, ()):
                self._values.append((parameter, parameter.detach().clone()))

    def note_writes(self, written: Iterable[torch.Tensor]) -> None:
        """Remember the parameters among these tensors, which are about to be written, for this
        moment and for later calls."""
        for tensor in written:
            name = self._names.pop(storage_key(tensor), None) if type(tensor) in _PLAIN else None
            known = _written.setdefault(self._model, set())
            if name is not None and name not in known:
                known.add(name)
                parameter = self._model.get_parameter(name)
                self._values.append((parameter, parameter.detach().clone()))

    def restore(self) -> None:
        """Restore it."""
        for holder, name, tensor in self._places:
            if holder.get(name) is not tensor:
                holder[name] = tensor
        for tensor, data in self._data:
            if storage_key(tensor) != storage_key(data):
                tensor.data = data
        with torch.no_grad():
            for tensor, before in self._values:
                # An earlier call may have saved it: autograd counts what is written to it.
                if tensor.layout is not torch.strided or not torch.equal(tensor, before):
                    tensor.copy_(before)
        self._restore_random()
