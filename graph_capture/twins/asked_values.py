"""The values of tensors that a model's code asks for, learned by calling it.

Code that decides by a value (`if x.sum() > 0`), or logs one (`x.max().item()`), cannot be followed
without data.  One call without gradients, which takes little memory, gives the values; random state
and buffers are as before afterwards, so that a call which follows asks for the same ones.

Blind spots: those of `graph_capture.model_state`; a value that is read behind the dispatcher's back
(`tolist`) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from graph_capture.model_state import remembered_state
from graph_capture.torch_compat import TorchDispatchMode
from graph_capture.twins.data_less import VALUE_OPS


def asked_values(model: nn.Module, call: Callable[[], object]) -> tuple[Any, ...]:
    """The values that `call`, which calls the model, asks for, in order."""
    recorder, restore = _ValueRecorder(), remembered_state(model)
    try:
        with torch.no_grad(), recorder:
            call()
    finally:
        restore()
    return tuple(recorder.values)


class _ValueRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in VALUE_OPS:
            self.values.append(out)
        return out
