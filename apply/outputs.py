"""Outputs of a planned forward that the caller is not to keep, or to read.

If a plan relies on the release of the model's output before the backward, a watcher warns where the
caller still has it then.  An output that the plan does not make is replaced by a tensor that raises
when it is read.

Blind spot: an output that both the caller and the model's backward keep alive counts as saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.overrides import get_default_nowrap_functions

from planner._apply.rewrite import RewrittenRegion
from planner._graph_capture.errors import PlannerError
from planner._graph_capture.fake_copies.storage_less import is_storage_less
from planner._graph_capture.joint_graph.joint import tensors_of
from planner._graph_capture.joint_graph.lower import LoweredRegion
from planner._graph_capture.torch_compat import FakeTensor, no_subclass_functions, storage_key

_LITTLE = 4096
"""Bytes that are not worth a warning: auxiliary losses in a list."""


_NO_CACHE = (
    "a planned training step makes no key-value cache (it is called with use_cache=False), as few "
    "loops read one, and this one does: call the model with use_cache=True")


class MissingCache:
    """Stands in an output for the key-value cache that a planned step does not make."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_NO_CACHE)

    def __len__(self) -> int:
        raise TypeError(_NO_CACHE)

    def __iter__(self) -> Any:
        raise TypeError(_NO_CACHE)

    def __getitem__(self, index: object) -> Any:
        raise TypeError(_NO_CACHE)


def with_missing_cache(output: Any) -> Any:
    """The output of a model of transformers, with a cache that raises where it is read if it has
    none: code that gets `None` would go on without it."""
    if not is_dataclass(output) or getattr(output, "past_key_values", output) is not None:
        return output
    return replace(output, past_key_values=MissingCache())  # type: ignore[type-var]


def places_to_watch(let_go: Collection[int], lowered: LoweredRegion, rewritten: RewrittenRegion
                    ) -> tuple[int, ...]:
    """Return the outputs among `let_go` that are freed before the backward unless the caller keeps
    them alive.  `let_go`: outputs that the plan expects the caller to release."""
    count = len(lowered.joint.forward_outputs)
    returned = rewritten.forward.graph.output_node().args[0]
    saved = {storage_key(tensor) for node in returned[count:] if isinstance(node, fx.Node)
             for tensor in tensors_of(node.meta["val"])}
    with_numbers, without = lowered.joint.returned_with_numbers, lowered.joint.returned
    return tuple(with_numbers.index(without[place])
                 for place, node in enumerate(lowered.returned)
                 if place in let_go and node is not None
                 and storage_key(node.meta["val"]) not in saved)


def watch(outputs: Sequence[Any], places: Sequence[int], report: Callable[[int], None]) -> None:
    """Call `report` when the backward begins with the bytes of these outputs that are still alive;
    do not call it if there are hardly any, or if the step is only traced."""
    if any(isinstance(outputs[place], FakeTensor) or is_storage_less(outputs[place])
           for place in places):
        return
    node = next((tensor.grad_fn for tensor in outputs
                 if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None), None)
    if node is None or not places:
        return
    storages = {storage_key(outputs[place]): weakref.ref(outputs[place].untyped_storage())
                for place in places}

    def begun(_: object) -> None:
        held = sum(storage.nbytes() for found in storages.values()
                   if (storage := found()) is not None)
        if held > _LITTLE:
            report(held)

    node.register_prehook(begun)


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
