"""Measures the memory of several stages of real code, one after the other."""

import gc
from collections.abc import Callable, Sequence
from itertools import accumulate

from planner._graph_capture.memory.allocator import AllocationRecord
from planner._graph_capture.torch_compat import cpu_allocations


def record_stages(stages: Sequence[Callable[[], object]]) -> tuple[AllocationRecord, ...]:
    """Run functions one after the other on the CPU and measure each.

    Peaks and ends are relative to the memory allocated when the first stage began, so memory left
    by one stage counts in the next.  Code that runs inside may begin further stages with
    `torch_compat.begin_stage()`.  Raises `RuntimeError` while a profiler is running.
    """
    gc.collect()
    level = 0
    records = []
    for sizes in cpu_allocations(*stages):
        levels = list(accumulate(sizes, initial=level))
        level = levels[-1]
        records.append(AllocationRecord(max(levels), level))
    return tuple(records)
