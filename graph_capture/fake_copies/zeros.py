"""Addresses of zeros that use (almost) no memory, for tensors whose values nobody reads.

On the CPU they are a private mapping, whose pages the system shares.  On a GPU a range of addresses
refers to the same 2 MiB of memory over and over (CUDA's virtual memory management), so that a
kernel that is launched past torch's dispatcher reads and writes nothing else.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch

from planner._graph_capture.torch_compat import no_active_modes, storage_at

_LEAST_BYTES = 1 << 30
_PINNED_MEMORY, _OF_DEVICE, _READ_AND_WRITE, _LEAST_GRANULARITY = 1, 1, 3, 0


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Allocation(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (("kind", ctypes.c_int), ("handle_kinds", ctypes.c_int), ("location", _Location),
                ("unused", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8))


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Zeros:
    """Pages of zeros on one device, each large enough for the storages that point to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages: list[tuple[int, int]] = []  # size, address
        self._owners: list[object] = []
        self._handle: ctypes.c_ulonglong | None = None  # the memory on a GPU
        self._step = 0

    def address(self, size_bytes: int) -> int:
        """Address of at least `size_bytes` zeros.  Raises `OSError` where the GPU has none."""
        for size, address in self._pages:
            if size >= size_bytes:
                return address
        size = max(_LEAST_BYTES, 2 * size_bytes)
        address = self._mapped(size) if self._device.type == "cpu" else self._mapped_on_gpu(size)
        self._pages.append((size, address))
        return address

    def holds(self, address: int) -> bool:
        """True if the address is that of such a page."""
        return any(address == page for _, page in self._pages)

    def _mapped(self, size_bytes: int) -> int:
        owner = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                          prot=mmap.PROT_READ)
        self._owners.append(owner)
        return int(np.frombuffer(owner, dtype=np.uint8).ctypes.data)

    def _mapped_on_gpu(self, size_bytes: int) -> int:
        place = _Location(_OF_DEVICE, self._device.index or 0)
        if self._handle is None:
            torch.cuda.init()
            how, step = _Allocation(_PINNED_MEMORY, 0, place), ctypes.c_size_t()
            _driver("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(how),
                    _LEAST_GRANULARITY)
            handle = ctypes.c_ulonglong()
            _driver("cuMemCreate", ctypes.byref(handle), step, ctypes.byref(how),
                    ctypes.c_ulonglong(0))
            self._handle, self._step = handle, step.value
        size = -(-size_bytes // self._step) * self._step
        address = ctypes.c_ulonglong()
        _driver("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size),
                ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))
        for begin in range(address.value, address.value + size, self._step):
            _driver("cuMemMap", ctypes.c_ulonglong(begin), ctypes.c_size_t(self._step),
                    ctypes.c_size_t(0), self._handle, ctypes.c_ulonglong(0))
        access = _Access(place, _READ_AND_WRITE)
        _driver("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(access),
                ctypes.c_size_t(1))
        with no_active_modes():
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(
                storage_at(address.value, self._step, self._device)).zero_()
        return address.value


def _driver(name: str, *arguments: object) -> None:
    """Call a function of CUDA's driver; raises `OSError` if it fails."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise OSError(f"{name} of CUDA's driver failed with status {status}")


_zeros: dict[torch.device, Zeros] = {}  # never released: storages outlive everything else


def zeros_on(device: torch.device) -> Zeros:
    """The zeros of a device."""
    if device not in _zeros:
        _zeros[device] = Zeros(device)
    return _zeros[device]


def has_zeros(device: torch.device) -> bool:
    """True if there are addresses of zeros on the device."""
    try:
        zeros_on(device).address(1)
    except (OSError, AttributeError):  # no such driver, or an old one
        return False
    return True
