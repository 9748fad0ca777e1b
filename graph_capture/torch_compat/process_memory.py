"""Memory of the CPU's allocator in a process in which several threads allocate and release."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from graph_capture.torch_compat.requirements import require

require(__name__)

import torch
from torch.profiler import ProfilerActivity, profile

from graph_capture.torch_compat.memory import _quiet_kineto

_ALLOCATION = torch._C._profiler._EventType.Allocation


def cpu_levels(fn: Callable[[], object]) -> list[int]:
    """Bytes that torch's CPU allocator has handed out, before `fn` runs (0) and after each event
    that the profiler sees meanwhile, in time order.

    Each event carries the allocator's own count (`total_allocated`, only in the private event
    tree), so that events of several threads add up.  Blocks that were allocated while no profiler
    ran, and what threads do to which torch does not hand its state, are not in it.
    """
    cpu = [ProfilerActivity.CPU]
    with _quiet_kineto(), profile(
            activities=cpu, profile_memory=True, acc_events=True) as session:
        torch.empty(1)  # the count may not start at 0: blocks of earlier sessions are in it
        fn()
    tree = session.profiler.kineto_results.experimental_event_tree()
    events = sorted((event.start_time_ns, number, event.typed[1])
                    for number, event in enumerate(_walk(tree)) if event.tag == _ALLOCATION
                    and event.typed[1].device.type == "cpu")
    fields = [field for *_, field in events]
    start = fields[0].total_allocated - fields[0].alloc_size
    return [0, *(field.total_allocated - start for field in fields)]


def _walk(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)
