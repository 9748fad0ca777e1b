"""Results that are on the host for a while: the functions that generated code calls.

The model of the world: each direction has a stream of its own.  A copy to the host begins when the
work queued so far on the device's current stream is done.  The tensor stays alive until that stream
has waited for the copy, so its memory is not overwritten before the copy is made.  A copy back
writes to memory of the current stream, begins when that stream no longer uses this memory, and ends
before the first reader.  So no memory is ever used by two streams at once, the allocator needs no
notice, and memory is allocated and freed at the places of the plan.

On a GPU the host's memory is pinned, without which a copy would stop the program.  On other devices
a substitute does plain copies into memory that does not come from torch's allocator, so measured
memory is that of a device.

Blind spots: torch's cache of pinned memory rounds sizes up to powers of two and keeps its memory;
the substitute's copies run in the time of the ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from planner._graph_capture.torch_compat import OpOverload, tensor_in_storage
from planner._graph_capture.torch_compat.dispatch import define_op


class Ending(Protocol):
    """The end of a copy, for which later work may wait."""

    def wait(self) -> None:
        """Make all later work of the current stream wait for the copy."""


class Copy:
    """A copy under way, which keeps its tensors alive.  It is waited for at the latest when it is
    deleted, as happens if a step is aborted."""

    def __init__(self, ending: Ending, held: Tensor, result: Tensor) -> None:
        self._ending: Ending | None = ending
        self._held = held
        self.result = result
        """The memory that is written to; until the end, for no other use than to find the copy."""

    def finish(self) -> Tensor:
        """Wait, and return the result for later work of the current stream."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.wait()
        return self.result

    def __del__(self) -> None:
        self.finish()


def begin_store(tensor: Tensor) -> Copy:
    """Begin to copy a tensor, with its whole storage, to the host."""
    store = _store_of(tensor.device)
    host = store.empty(tensor.untyped_storage().nbytes())
    return Copy(store.copy(host, _bytes_of(tensor)), tensor,
                tensor_in_storage(host.untyped_storage(), tensor))


def begin_fetch(host: Tensor, device: torch.device) -> Copy:
    """Begin to copy back a result of `begin_store`."""
    storage = torch.empty(host.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    ending = _store_of(device).copy(storage, _bytes_of(host))
    return Copy(ending, host, tensor_in_storage(storage.untyped_storage(), host))


def finish(copy: Copy) -> Tensor:
    """Return the tensor of a copy, once the copy has ended."""
    return copy.finish()


_under_way: dict[int, Copy] = {}
"""Copies of generated code, which passes tensors alone, by the address of the result."""


def _begun(copy: Copy) -> Tensor:
    result = copy.result
    _under_way[result.data_ptr()] = copy
    return result


def _store(tensor: Tensor) -> Tensor:
    return _begun(begin_store(tensor))


def _fetch(host: Tensor, device: torch.device) -> Tensor:
    return _begun(begin_fetch(host, device))


def _finish(result: Tensor) -> Tensor:
    return torch.ops.aten.alias.default(_under_way.pop(result.data_ptr()).finish())


def _traced_copy(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype,
                               device=device or "cpu")


OPS: Mapping[Any, OpOverload] = {
    begin_store: define_op("store", "(Tensor tensor) -> Tensor", _store, _traced_copy),
    begin_fetch: define_op("fetch", "(Tensor host, Device device) -> Tensor", _fetch, _traced_copy),
    finish: define_op("finish", "(Tensor(a) result) -> Tensor(a)", _finish,
                      torch.ops.aten.alias.default)}
"""The functions as ops that a compiler calls as they are."""


class SharedHost:
    """The host of a device that shares its memory: for tests, of no use to training."""

    def empty(self, size_bytes: int) -> Tensor:
        return torch.frombuffer(bytearray(size_bytes), dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Ending:
        target.copy_(source)
        return self

    def wait(self) -> None:
        """The copy is already made."""


class PinnedHost:
    """The host of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def empty(self, size_bytes: int) -> Tensor:
        """Allocate memory of the host, as bytes."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> Ending:
        """Begin to copy bytes between the device and the host."""
        stream = self._inward if target.is_cuda else self._outward
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return event


_stores: dict[torch.device, PinnedHost | SharedHost] = {}


def _store_of(device: torch.device) -> PinnedHost | SharedHost:
    if device not in _stores:
        _stores[device] = PinnedHost(device) if device.type == "cuda" else SharedHost()
    return _stores[device]


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
