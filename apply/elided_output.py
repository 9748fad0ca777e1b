"""Placeholder tensor for an elided output of the model; reading it raises an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import get_default_nowrap_functions

from planner._graph_capture.errors import PlannerError
from planner._graph_capture.torch_compat import FakeTensor, no_subclass_functions

_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16,
                    torch.Tensor.double, torch.Tensor.to, torch.Tensor.detach})
_OF_SHAPE = frozenset({torch.Tensor.size, torch.Tensor.stride, torch.Tensor.dim,
                       torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.is_floating_point,
                       torch.Tensor.register_hook, torch.Tensor.__len__, torch.Tensor.__hash__,
                       torch.Tensor.untyped_storage, torch.Tensor.get_device})


class OutputNotMade(PlannerError, RuntimeError):
    """An elided output of the model was read."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(
            f"the model's output of shape {tuple(shape)} was not made: the plan runs the part that "
            "makes it in chunks, and was made for a caller that reads the loss alone "
            "(hold_output=False); plan with hold_output=True to read it")
        self._shape = tuple(shape)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._shape,)


class ElidedOutput(torch.Tensor):
    """Has shape, dtype and device; reading it raises `OutputNotMade`."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Sequence[type],
                           args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
                           ) -> Any:
        given = kwargs or {}
        with no_subclass_functions():
            if func in get_default_nowrap_functions() or func in _OF_SHAPE or (
                    getattr(func, "__name__", "") == "__get__"):
                return func(*args, **given)
            if func in _CASTS:  # as wrappers of models do with all outputs
                single = args[0][(slice(0, 1),) * args[0].dim()]
                return func(single, *args[1:], **given).expand(args[0].shape).as_subclass(cls)
            shape = next((arg.shape for arg in (*args, *given.values()) if isinstance(arg, cls)),
                         ())
        raise OutputNotMade(shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ElidedOutput(shape={tuple(self.shape)}, dtype={self.dtype})"


def without_elided(outputs: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Return the outputs, with those at these places unreadable, unless a step is traced."""
    if not places:
        return outputs
    return type(outputs)(  # type: ignore[call-arg]
        value.as_subclass(ElidedOutput)
        if place in places and not isinstance(value, FakeTensor) else value
        for place, value in enumerate(outputs))
