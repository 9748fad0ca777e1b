"""Results that are away from the device for a while: what the generated code calls.

The model of the world: each direction has a stream of its own.  A copy to the host begins when
what the device's current stream has been given so far is done; the tensor is held until that stream
has waited for the copy, so that its memory, once let go, is not written before the copy is made.  A
copy back is into memory of the current stream, begins when that is done with whatever the memory
held before, and is waited for before the first reader.  So no memory is ever used by two streams at
once, the allocator needs to be told nothing, and memory is taken and let go where the plan says.

On a GPU the host's memory is pinned, without which a copy would hold the program up.  Elsewhere a
stand-in takes the host's part: plain copies into memory that does not come from torch's allocator,
so that what is measured is what a device would hold.

Blind spots: torch's cache of pinned memory rounds sizes up to powers of two and keeps what it has;
the stand-in's copies take the time of the ops.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Ending(Protocol):
    """The end of a copy, at which what comes after it may be held up."""

    def wait(self) -> None:
        """What the current stream is given from now on comes after the copy."""


class HostStore(Protocol):
    """The memory beside a device."""

    def empty(self, size_bytes: int) -> Tensor:
        """Memory of the host, as bytes."""

    def copy(self, target: Tensor, source: Tensor) -> Ending:
        """Begin to copy bytes, between the device and the host."""


class Copy:
    """A copy under way, which holds its tensors; what comes in its place is waited for at the
    latest when it is let go, as happens where a step is broken off."""

    def __init__(self, ending: Ending, held: Tensor, result: Tensor) -> None:
        self._ending: Ending | None = ending
        self._held = held
        self._result = result

    def finish(self) -> Tensor:
        """The result, for what the current stream is given from now on."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.wait()
        return self._result

    def __del__(self) -> None:
        self.finish()


def begin_store(tensor: Tensor) -> Copy:
    """Begin to copy a tensor, and all of the storage that it lies in, to the host."""
    store = _store_of(tensor.device)
    host = store.empty(tensor.untyped_storage().nbytes())
    return Copy(store.copy(host, _bytes_of(tensor)), tensor, _laid_out(host, tensor))


def begin_fetch(host: Tensor, device: torch.device) -> Copy:
    """Begin to copy back what `begin_store` made."""
    storage = torch.empty(host.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    ending = _store_of(device).copy(storage, _bytes_of(host))
    return Copy(ending, host, _laid_out(storage, host))


def finish(copy: Copy) -> Tensor:
    """The tensor that a copy makes, once it has ended."""
    return copy.finish()


class SharedHost:
    """The host of a device that shares its memory: for tests, of no use to training."""

    def empty(self, size_bytes: int) -> Tensor:
        return torch.frombuffer(bytearray(size_bytes), dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Ending:
        target.copy_(source)
        return self

    def wait(self) -> None:
        """The copy is made."""


class PinnedHost:
    """The host of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def empty(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> Ending:
        stream = self._inward if target.is_cuda else self._outward
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return event


_stores: dict[torch.device, HostStore] = {}


def _store_of(device: torch.device) -> HostStore:
    if device not in _stores:
        _stores[device] = PinnedHost(device) if device.type == "cuda" else SharedHost()
    return _stores[device]


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _laid_out(storage: Tensor, like: Tensor) -> Tensor:
    """Bytes as a tensor with dtype and layout of another."""
    return torch.empty(0, dtype=like.dtype, device=storage.device).set_(
        storage.untyped_storage(), like.storage_offset(), like.size(), like.stride())
