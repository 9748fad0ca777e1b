"""A training loop as a memory snapshot of torch, for the viewer at https://pytorch.org/memory_viz.

The format is that of `torch.cuda.memory._snapshot()`: memory allocated at the end, and every
allocation and release before.  The viewer reads pickles of protocol 2 to 4 that contain only lists,
dictionaries, text and numbers; if events have categories, one of them must be of the category
`unknown`, or it stops with an error.

Blocks get addresses from a simple first-fit allocator, in one segment of the required size.  Gaps
in the snapshot are therefore not those of a real allocator.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, insort
from os import PathLike
from typing import Any

from planner._graph_capture.memory.trace import Block
from planner.step.loop_trace import LoopTrace
from planner.whole_file import write_whole

_PROTOCOL = 4
_BASE_ADDRESS = 0x100000000
_STREAM = 0


def save_snapshot(loop: LoopTrace, path: str | PathLike[str]) -> None:
    """Write `snapshot(loop)` to `path` atomically; an existing file is replaced.

    Raises `OSError` if the path cannot be written.
    """
    write_whole(path, pickle.dumps(snapshot(loop), protocol=_PROTOCOL))


def snapshot(loop: LoopTrace) -> dict[str, Any]:
    """The loop in torch's format: plain lists, dictionaries, text and integers."""
    trace = loop.trace
    space = _AddressSpace()
    address: dict[int, int] = {}
    frames: dict[tuple[Block, str], list[dict[str, Any]]] = {}
    made: dict[int, list[dict[str, Any]]] = {}
    events = [*_nothing_unknown()]
    for span in loop.spans:
        when = (span.phase.value if span.iteration == 0 else
                f"{span.phase.value}, step {span.iteration}, micro-batch {span.micro_batch + 1}")
        for event in trace.events[span.start:span.stop]:
            number = event if event >= 0 else ~event
            block = trace.blocks[number]
            if not block.size_bytes:
                continue
            if event >= 0:
                made[number] = frames.setdefault((block, when), _frames(block, when))
                address[number] = space.take(block.size_bytes)
                events.append({
                    "action": "alloc", "addr": address[number], "size": block.size_bytes,
                    "stream": _STREAM, "frames": made[number], "category": block.category.value})
            else:
                space.give_back(address[number], block.size_bytes)
                events += [{"action": action, "addr": address[number], "size": block.size_bytes,
                            "stream": _STREAM, "frames": made[number]}
                           for action in ("free_requested", "free_completed")]
                del address[number]
    alive = sorted(((start, trace.blocks[number].size_bytes, made[number])
                    for number, start in address.items()), key=lambda block: block[:2])
    return {"segments": [_segment(alive, space.size_bytes)], "device_traces": [events],
            "allocator_settings": {}}


def _frames(block: Block, when: str) -> list[dict[str, Any]]:
    """Two frames in place of a stack: the op that allocated the block, and the phase."""
    where = block.module or block.label or "model"
    return [{"name": block.op or block.category.value, "filename": where, "line": 0},
            {"name": when, "filename": "training loop", "line": 0}]


def _nothing_unknown() -> list[dict[str, Any]]:
    """An empty allocation of the category `unknown`, which the viewer requires."""
    event = {"addr": _BASE_ADDRESS, "size": 0, "stream": _STREAM}
    return [{"action": "alloc", **event, "frames": [], "category": "unknown"},
            {"action": "free_requested", **event, "frames": []},
            {"action": "free_completed", **event, "frames": []}]


def _segment(alive: list[tuple[int, int, list[dict[str, Any]]]],
             size_bytes: int) -> dict[str, Any]:
    blocks = []
    position = _BASE_ADDRESS
    for start, size, frames in alive:
        if position < start:
            blocks.append(_gap(start - position))
        blocks.append({"size": size, "requested_size": size, "state": "active_allocated",
                       "frames": frames})
        position = start + size
    end = _BASE_ADDRESS + size_bytes
    if position < end:
        blocks.append(_gap(end - position))
    held = sum(size for _, size, _ in alive)
    return {"device": 0, "address": _BASE_ADDRESS, "total_size": size_bytes, "stream": _STREAM,
            "segment_type": "large", "allocated_size": held, "active_size": held,
            "requested_size": held, "frames": [], "blocks": blocks}


def _gap(size: int) -> dict[str, Any]:
    return {"size": size, "requested_size": 0, "state": "inactive", "frames": []}


class _AddressSpace:
    """First-fit allocator of addresses, which grows at the end."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = []  # start and size, by start
        self.size_bytes = 0

    def take(self, size: int) -> int:
        for place, (start, headroom) in enumerate(self._gaps):
            if headroom >= size:
                self._gaps[place : place + 1] = (
                    [(start + size, headroom - size)] if headroom > size else []
                )
                return start
        start = _BASE_ADDRESS + self.size_bytes
        if self._gaps and sum(self._gaps[-1]) == start:
            start = self._gaps.pop()[0]
        self.size_bytes = start + size - _BASE_ADDRESS
        return start

    def give_back(self, start: int, size: int) -> None:
        place = bisect_left(self._gaps, (start, 0))
        if place < len(self._gaps) and self._gaps[place][0] == start + size:
            size += self._gaps.pop(place)[1]
        if place and sum(self._gaps[place - 1]) == start:
            place -= 1
            before, headroom = self._gaps.pop(place)
            start, size = before, headroom + size
        insort(self._gaps, (start, size))
