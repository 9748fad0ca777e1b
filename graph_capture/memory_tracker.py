"""Which storages live when, while code runs on fake tensors under autograd.

The model of the world: memory changes when an op makes a storage, and when the last reference to a
storage goes, whoever held it: a Python variable, a saved tensor, autograd's buffers.  Storages are
followed by weak references, as `torch.distributed._tools.MemTracker` does, and while an op runs its
workspace counts as well.

Autograd treats fake tensors differently in one place that matters: where the gradients of a tensor
that is used twice are summed, it adds in place if the tensors are plain, and makes a third if one
is of a subclass.  The tracker adds in place where autograd would have.

Blind spots: formulas of some rare derivatives (`max` over all elements, `prod`) that autograd also
writes differently for subclasses.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graph_capture.allocator import allocated_bytes
from graph_capture.torch_compat import GradientSums, OpOverload, storage_key

Workspace = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any], Any], int]
"""Bytes that an op allocates for itself: `OpProbe.workspace_bytes`, for one."""


class MemoryTracker(TorchDispatchMode):
    """Log of the storages made and released on one device; to be entered above the fake mode."""

    def __init__(self, workspace: Workspace, *, device: torch.device, trace_device: torch.device,
                 resident: Iterable[torch.Tensor]) -> None:
        """`device`: the one planned for, by whose allocator sizes are counted; `trace_device`: the
        one that its fake tensors claim to be on.  `resident`: tensors that do not count."""
        super().__init__()
        self._workspace, self._device, self._trace_device = workspace, device, trace_device
        self._resident = {storage_key(tensor) for tensor in resident}
        self._number_of: dict[int, int] = {}  # key of a live storage -> its number
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: list[int] = []  # by number
        self._log: list[tuple[int, int]] = []  # number (or -1: workspace), change in bytes
        self._sums, self._in_backward = GradientSums(), False
        self._closed = False
        self.live_bytes = 0
        """Bytes of the storages alive now."""
        self.peak_bytes = 0
        """The most since the tracker was made or `restart_peak` was called, workspace included."""

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.live_bytes

    def start_of_backward(self) -> int:
        """From here on autograd's engine runs; returns the number of the next storage."""
        self._in_backward = True
        return len(self._sizes)

    def close(self) -> None:
        """Take no notice of what is released from here on."""
        self._closed = True

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Number of the tensor's storage, in the order in which storages were made."""
        return self._number_of.get(storage_key(tensor))

    def alive_at_peak(self) -> tuple[Mapping[int, int], int]:
        """Bytes by storage number, and workspace, at the first moment of the highest memory."""
        level = best = 0
        best_position = -1
        for position, (number, change) in enumerate(self._log):
            reached = level + change
            if reached > best:
                best, best_position = reached, position
            if number >= 0:
                level = reached
        alive: defaultdict[int, int] = defaultdict(int)
        for number, change in self._log[:best_position + 1]:
            if number >= 0:
                alive[number] += change
        number, change = self._log[best_position] if best_position >= 0 else (0, 0)
        workspace = change if number < 0 else 0
        return {number: size for number, size in alive.items() if size}, workspace

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if (self._in_backward and func is torch.ops.aten.add.Tensor
                and self._sums.in_place(args)):
            func = torch.ops.aten.add_.Tensor
        out = func(*args, **kwargs)
        if isinstance(func, OpOverload):
            if not func.is_view:
                self._follow_new(func, args, kwargs, out)
            transient = self._workspace(func, args, kwargs, out)
            if transient:
                self._log.append((-1, transient))
                self.peak_bytes = max(self.peak_bytes, self.live_bytes + transient)
        return out

    def _follow_new(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                    out: Any) -> None:
        # What an op writes in place is no new storage, even if it was made out of sight.
        written = {storage_key(leaf) for leaf in pytree.tree_leaves((args, kwargs))
                   if isinstance(leaf, torch.Tensor)} if func._schema.is_mutable else ()
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in written:
                self._follow(leaf)

    def _follow(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._trace_device.type or tensor.layout is not torch.strided:
            return
        key = storage_key(tensor)
        if key in self._number_of or key in self._resident:
            return
        storage = tensor.untyped_storage()
        number = len(self._sizes)
        size = allocated_bytes(storage.nbytes(), self._device)
        self._number_of[key] = number
        self._sizes.append(size)
        self._references[number] = weakref.ref(storage, lambda _: self._released(key, number))
        self._change(number, size)

    def _released(self, key: int, number: int) -> None:
        if self._closed:
            return
        del self._number_of[key], self._references[number]
        self._change(number, -self._sizes[number])

    def _change(self, number: int, change: int) -> None:
        self._log.append((number, change))
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
