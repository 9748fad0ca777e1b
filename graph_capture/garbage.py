"""The frequency of Python's garbage collection while a step is captured and planned, and what the C
library keeps of the memory that was freed.

Graphs of thousands of ops are long-lived objects that each collection scans again.  Fewer
collections save time at the price of some memory.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (10_000, 10, 10)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Inside, Python collects garbage less often than by default, unless the caller has set it to
    even fewer collections or none."""
    before = gc.get_threshold()
    if 0 < before[0] < _THRESHOLDS[0]:
        gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def collected() -> Iterator[None]:
    """Behind it, the garbage that was made inside is collected.  Caught errors and the compiler's
    refer to frames, which refer to the caller's frame and would keep its variables alive beyond the
    step.

    What was there before is not looked at: where transformers is imported, that takes 0.7 s.
    """
    is_frozen = gc.get_freeze_count() > 0  # by the user: it stays so
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not is_frozen:
            gc.unfreeze()


def give_back_freed_memory() -> None:
    """Return freed memory of the heap to the system, where the C library can (glibc).

    Tensors of ever other sizes leave gaps between each other that it keeps.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
