"""Other kernels for ops of torch, for as long as a block of code runs in this thread.

The model of the world: torch's dispatcher finds the kernel of an op by the key that is in charge.
A function registered there stands before what torch would run, for whoever calls the op: Python,
torch's own C++, Dynamo, AOTAutograd.  The registration is one of the whole process, and so is
there only while a thread wants it; in other threads the function hands on to what is beneath.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from planner._graph_capture.torch_compat.requirements import require

require(__name__)

import torch
from torch._ops import OpOverload


class Place(NamedTuple):
    """Where a kernel stands."""

    op: OpOverload
    key: str
    """`AutogradCPU`: in place of how torch composes the op of others; `AutocastCPU`: where autocast
    is on, before it; `CPU`: so that there is a kernel, and autograd has the op's own backward."""


_LOCK = threading.Lock()
_wanted: Counter[Place] = Counter()
_registered: dict[Place, torch.library.Library] = {}
_of_thread = threading.local()


@contextmanager
def kernels_replaced(kernels: Mapping[Place, Callable[..., Any]]) -> Iterator[None]:
    """Inside, and in this thread, these functions are the kernels of ops, with arguments and
    results as the op's.

    For autocast a kernel is left out where torch has one of its own for the CPU.
    """
    places = [place for place in kernels if not (
        place.key == "AutocastCPU" and place not in _registered and has_kernel(*place))]
    with _LOCK:
        for place in places:
            _wanted[place] += 1
            if place not in _registered:
                library = torch.library.Library("aten", "IMPL")
                # Where a graph breaks, Dynamo would compile what the dispatcher calls.
                library.impl(place.op, torch.compiler.disable(functools.partial(_run, place)),
                             place.key)
                _registered[place] = library
                place.op._dispatch_cache.clear()
    before = getattr(_of_thread, "kernels", {})
    _of_thread.kernels = {**before, **{place: kernels[place] for place in places}}
    try:
        # What decomposes recurrent layers asks for the CPU's library; C++ does not ask here.
        with mock.patch.object(torch._C, "_get_mkldnn_enabled", new=lambda: False):
            yield
    finally:
        _of_thread.kernels = before
        with _LOCK:
            for place in places:
                _wanted[place] -= 1
                if not _wanted[place]:
                    _registered.pop(place)._destroy()
                    place.op._dispatch_cache.clear()


def has_kernel(op: OpOverload, key: str) -> bool:
    """Return whether an op has a kernel at a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def _run(place: Place, *args: Any, **kwargs: Any) -> Any:
    decomposition = decomposition_of(place.op)
    if decomposition is not None and torch._C._dispatch_tls_is_dispatch_key_included(
            torch._C.DispatchKey.PythonDispatcher):  # as AOTAutograd traces it on every device
        return decomposition(*args, **kwargs)
    kernel = getattr(_of_thread, "kernels", {}).get(place)
    if place.key == "AutocastCPU":
        with beneath_autocast():
            return (kernel or place.op)(*args, **kwargs)
    return (kernel or as_composed(place.op))(*args, **kwargs)


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """Return AOTAutograd's own decomposition of an op, where it differs from torch's composition.
    """
    found: Callable[..., Any] | None = op.py_kernels.get(torch._C.DispatchKey.Autograd)
    return found


def as_composed(op: OpOverload) -> Callable[..., Any]:
    """How torch composes an op of others."""
    return functools.partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


def beneath_autocast() -> Any:
    """Inside, autocast does not change what ops are called with."""
    return torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


@dataclass(frozen=True, slots=True)
class AttentionSwitches:
    """The caller's settings for the kernels of `scaled_dot_product_attention`."""

    enabled: frozenset[str]
    """Kernels that are switched on: `flash`, `efficient`, `cudnn`, `math`."""
    order: tuple[str, ...] | None
    """Which are tried first; `None`: the caller says nothing of it."""


_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")


def kernel_chosen_by_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                           mask: torch.Tensor | None, dropout: float, is_causal: bool,
                           grouped: bool) -> str:
    """Return the kernel of `scaled_dot_product_attention` on the device of its operands, which is
    present."""
    return _BACKENDS[torch._fused_sdp_choice(query, key, value, mask, dropout, is_causal,
                                             enable_gqa=grouped)]


def attention_switches() -> AttentionSwitches:
    """Of the context and the thread that run."""
    enabled = {"flash": torch._C._get_flash_sdp_enabled,
               "efficient": torch._C._get_mem_efficient_sdp_enabled,
               "cudnn": torch._C._get_cudnn_sdp_enabled, "math": torch._C._get_math_sdp_enabled}
    order = tuple(_BACKENDS[number] for number in torch._C._get_sdp_priority_order()
                  if number in _BACKENDS)
    return AttentionSwitches(frozenset(name for name, is_on in enabled.items() if is_on()),
                             None if order == _DEFAULT_ORDER else order)
