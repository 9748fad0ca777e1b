"""Other kernels for ops of torch while a block of code runs in this thread, and ops of our own.

The model of the world: torch's dispatcher finds the kernel of an op by the active dispatch key.  A
function registered there replaces torch's kernel for every caller of the op: Python, torch's own
C++, Dynamo, AOTAutograd.  The registration applies to the whole process, so it exists only while a
thread needs it; in other threads the function calls the original kernel.

Blind spot: where the CPU's autocast has a kernel that is replaced, other threads run the op without
autocast meanwhile.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch._decomp.decompositions import upsample_compute_output_size
from torch._ops import OpOverload


class Place(NamedTuple):
    """An op and the dispatch key of a kernel."""

    op: OpOverload
    key: str
    """`AutogradCPU`: replaces torch's composition of the op; `AutocastCPU`: runs before it while
    autocast is on; `CPU`: adds a kernel, so that autograd uses the op's own backward."""


_LOCK = threading.Lock()
_wanted: Counter[Place] = Counter()
_registered: dict[Place, torch.library.Library] = {}
_of_thread = threading.local()


@contextmanager
def kernels_replaced(kernels: Mapping[Place, Callable[..., Any]]) -> Iterator[None]:
    """Inside, and in this thread, these functions are the kernels of ops, with the op's arguments
    and results.

    For autocast a kernel is left out if torch has one of its own for the CPU as well as for CUDA.
    """
    places = [place for place in kernels if not (
        place.key == "AutocastCPU" and place not in _registered and has_kernel(*place)
        and has_kernel(place.op, "AutocastCUDA"))]
    with _LOCK:
        for place in places:
            _wanted[place] += 1
            if place not in _registered:
                library = torch.library.Library("aten", "IMPL")
                # Where a graph breaks, Dynamo would compile what the dispatcher calls.
                run = torch.compiler.disable(functools.partial(_run, place))
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Warning only once for all operators")
                    library.impl(place.op, run, place.key)
                _registered[place] = library
                place.op._dispatch_cache.clear()
    before = getattr(_of_thread, "kernels", {})
    _of_thread.kernels = {**before, **{place: kernels[place] for place in places}}
    try:
        # The decomposition of recurrent layers asks for the CPU's library; C++ does not ask here.
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
    """True if an op has a kernel at a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def ops_of_cpu_autocast_only() -> frozenset[str]:
    """Names of the ops of `aten` that the CPU's autocast changes and that of CUDA does not."""
    registered: Any = torch._C._dispatch_get_registrations_for_dispatch_key
    only = {*registered("AutocastCPU")} - {*registered("AutocastCUDA")}
    return frozenset(name.removeprefix("aten::") for name in only if name.startswith("aten::"))


def _run(place: Place, *args: Any, **kwargs: Any) -> Any:
    decomposition = decomposition_of(place.op)
    if decomposition is not None and torch._C._dispatch_tls_is_dispatch_key_included(
            torch._C.DispatchKey.PythonDispatcher):  # as AOTAutograd traces it on every device
        return decomposition(*args, **kwargs)
    kernel = getattr(_of_thread, "kernels", {}).get(place)
    if place.key == "AutocastCPU" and kernel is None:
        with beneath_autocast():
            return place.op(*args, **kwargs)
    return (kernel or as_composed(place.op))(*args, **kwargs)


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """AOTAutograd's own decomposition of an op, if it differs from torch's composition."""
    found: Callable[..., Any] | None = op.py_kernels.get(torch._C.DispatchKey.Autograd)
    return found


_DECOMPOSED = re.compile(
    r"_?upsample_(?!.*_aa$)|(cudnn_batch_norm|dropout|hardshrink|softshrink|multi_margin_loss"
    r"|multilabel_margin_loss_forward)$")
"""Ops that AOTAutograd composes of others although autograd runs them, with their own backward."""
_AUTOGRAD_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


@contextmanager
def decompositions_off() -> Iterator[None]:
    """Inside, AOTAutograd traces ops as autograd runs them: `upsample_bilinear2d`, for one, and its
    backward, in place of 20 gathers and products that sum in another order and save more.

    Left to it are dropout where it gives the same values (a mask of one byte an element), batch
    normalization on a CPU (the same kernel), and recurrent layers (`torch_compat.recurrent`).
    """
    before = [(op, dict(op.py_kernels)) for op in _decomposed_ops()]
    try:
        for op, kernels in before:
            for key in {*kernels}.intersection(_AUTOGRAD_KEYS):
                decomposition = op.py_kernels.pop(key)
                if op is torch.ops.aten.dropout.default:
                    op.py_kernels[key] = functools.partial(_dropout, decomposition)
                elif op._overloadname == "vec":
                    op.py_kernels[key] = functools.partial(_resize, op)
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in before:
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


@functools.cache
def _decomposed_ops() -> tuple[OpOverload, ...]:
    names = {name.removeprefix("aten::").partition(".")[0]
             for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    packets = [getattr(torch.ops.aten, name) for name in sorted(names) if _DECOMPOSED.match(name)]
    return tuple(op for packet in packets
                 for op in (getattr(packet, overload) for overload in packet.overloads())
                 if any(key in op.py_kernels for key in _AUTOGRAD_KEYS))


def _dropout(decomposition: Callable[..., Any], x: torch.Tensor, p: float, train: bool) -> Any:
    """Dropout on a CPU, whose factors are rounded to the type of `x`; `native_dropout`, which saves
    a mask of one byte an element, rounds only the gradient in 16 bits, and for some `p` rounds
    otherwise in 32."""
    if not (train and 0 < p < 1) or x.dtype == torch.float64 or (
            x.dtype == torch.float32 and _divides_as_it_multiplies(1 - p)) or (
            x.device.type not in ("cpu", "meta") or getattr(_of_thread, "kernels", None)):
        return decomposition(x, p, train)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * mask.to(x.dtype).div_(1 - p)


def _divides_as_it_multiplies(value: float) -> bool:
    """True if 1 divided by a number is the same in 32 bits as in 64, rounded."""
    return bool(np.float32(1) / np.float32(value) == np.float32(1 / value))


def _resize(op: OpOverload, x: torch.Tensor, size: Sequence[int] | None, *rest: Any) -> Any:
    """`interpolate` by size or by factors; torch's own composition takes no symbolic sizes."""
    *corners, factors = rest
    size = upsample_compute_output_size(x.shape, size, factors)
    return op._overloadpacket.default(x, size, *corners, *(factors or ()))


def as_composed(op: OpOverload) -> Callable[..., Any]:
    """torch's composition of an op from others."""
    return functools.partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


def may_copy(op: OpOverload) -> bool:
    """True if an op returns a view or a copy, as `to` and `reshape` do.

    Autograd composes it from others; a mode sees it as one op inside a subclass's
    `__torch_dispatch__`.
    """
    return op.is_view and has_kernel(op, "CompositeImplicitAutograd")


def beneath_autocast() -> Any:
    """Inside, autocast does not change the arguments of ops."""
    return torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")


def attention_switches() -> tuple[frozenset[str], tuple[str, ...] | None]:
    """The settings of the running context and thread for `scaled_dot_product_attention`: which of
    the kernels `flash`, `efficient`, `cudnn` and `math` are switched on, and the order in which
    they are tried; `None`: the caller has not set one."""
    enabled = {"flash": torch._C._get_flash_sdp_enabled,
               "efficient": torch._C._get_mem_efficient_sdp_enabled,
               "cudnn": torch._C._get_cudnn_sdp_enabled, "math": torch._C._get_math_sdp_enabled}
    order = tuple(_BACKENDS[number] for number in torch._C._get_sdp_priority_order()
                  if number in _BACKENDS)
    return (frozenset(name for name, is_on in enabled.items() if is_on()),
            None if order == _DEFAULT_ORDER else order)


_LIBRARY = torch.library.Library("checkpoint_planner", "FRAGMENT")


def define_op(name: str, schema: str, kernel: Callable[..., Any],
              fake: Callable[..., Any] | None = None, tags: tuple[torch.Tag, ...] = ()
              ) -> OpOverload:
    """Define an op `checkpoint_planner::name` of this package with a kernel for every device.
    `name`: with the overload, if any; `fake`: the kernel for fake tensors, if it is another."""
    _LIBRARY.define(name + schema, tags=tags)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"checkpoint_planner::{name}", fake or kernel, lib=_LIBRARY)
    packet, _, overload = name.partition(".")
    defined: OpOverload = getattr(getattr(torch.ops.checkpoint_planner, packet),
                                  overload or "default")
    return defined
