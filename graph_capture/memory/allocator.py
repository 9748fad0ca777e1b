"""Measures the device's allocator: the size of a block, and the peak of a run of real code.

The model of the world: memory is what torch's allocator has handed out and not received back;
predictions are evaluated against this measurement.  On CUDA it counts requested bytes:
`torch.cuda.max_memory_allocated` also counts unsplit rests at the ends of blocks, up to 1 MiB each,
which depend on earlier allocations.

Blind spots: on the CPU only the calling thread and torch's own threads are seen.  Releases of
blocks that were allocated before the measurement are not seen; releases by another thread only when
the address is reused.  Memory that a library allocates from the operating system, and
fragmentation, are seen on no device.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch

from planner._graph_capture.memory.caching_allocator import rounded_bytes
from planner._graph_capture.torch_compat import cpu_allocations


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """Bytes that the allocator of `device` counts for a storage of `size_bytes`.

    The CPU's allocator counts the size asked for; its alignment to 64 bytes is not counted.
    """
    if device.type == "cuda":
        return rounded_bytes(size_bytes)
    return size_bytes


@dataclass(frozen=True, slots=True)
class AllocationRecord:
    """Memory during a run, above the memory allocated at its start."""

    peak_bytes: int
    """Maximum at any time; at least 0."""
    end_bytes: int
    """Bytes still allocated at the end; negative if the run freed more than it allocated."""


def record_peak(fn: Callable[[], object], device: torch.device | str) -> AllocationRecord:
    """Run `fn` once and measure its allocations on `device`.

    The result of `fn` is released before the end is measured.  Raises `ValueError` for a device
    without an allocator that can be watched, `RuntimeError` while a profiler is running.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected a cpu or cuda device, got `{device}`: its allocator cannot be "
                         "watched")
    gc.collect()  # otherwise garbage of earlier code would be released during the run
    return record_peak_of_op(fn, device)


def record_peak_of_op(fn: Callable[[], object], device: torch.device) -> AllocationRecord:
    """`record_peak` without garbage collection, for very short runs: a hundred times faster."""
    if device.type == "cpu":
        levels = list(accumulate(cpu_allocations(fn)[0], initial=0))
        return AllocationRecord(max(levels), levels[-1])
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = requested_bytes(device)
    fn()
    torch.cuda.synchronize(device)
    return AllocationRecord(highest_requested_bytes(device) - start,
                            requested_bytes(device) - start)


def requested_bytes(device: torch.device) -> int:
    """Bytes that are requested from the allocator of a GPU now."""
    return _statistic(device, "current")


def highest_requested_bytes(device: torch.device) -> int:
    """The maximum of `requested_bytes` since the statistics were reset."""
    return _statistic(device, "peak")


def _statistic(device: torch.device, what: str) -> int:
    # Not `memory_stats`, which takes longer than a call of a planned block may.
    found = torch.cuda.memory_stats_as_nested_dict(device)
    if not found:  # before anything was allocated
        return 0
    # The allocator of the driver (`cudaMallocAsync`) does not count requests.
    requested: int = found["requested_bytes"]["all"][what]
    return requested or int(found["allocated_bytes"]["all"][what])


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost"))


@cache
def _mallinfo() -> Callable[[], _Mallinfo] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo
    return function


def heap_bytes() -> int | None:
    """Bytes that the process holds of the C library's heap, which is the CPU allocator of torch;
    `None` if it does not tell.  Python's own objects are included; takes 60 microseconds."""
    function = _mallinfo()
    if function is None:
        return None
    found = function()
    return int(found.uordblks + found.hblkhd)
