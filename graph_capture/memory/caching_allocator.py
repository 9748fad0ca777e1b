"""A model of torch's caching allocator for CUDA: its reserved memory while blocks come and go.

The model of the world, after `c10/cuda/CUDACachingAllocator.cpp` of torch with its default
settings, with which it agrees to the byte in 2.11.0, 2.12.1 and 2.15.0 (`benchmarks/allocator.py`):
one device, one stream, unlimited memory.  A request is rounded up to 512 bytes.  Requests up to 1
MiB are served from segments of 2 MiB, larger ones from a pool of their own, with segments of 20 MiB
for requests below 10 MiB, otherwise of the request rounded up to 2 MiB.  The smallest sufficient
free block serves a request, among equals the one at the lowest address.  Its rest becomes a free
block if it has at least 512 bytes, and in the large pool more than 1 MiB.  A released block joins
its free neighbours in the segment.  A segment stays reserved.

With expandable segments (`PYTORCH_ALLOC_CONF=expandable_segments:True`) each pool is one segment
that grows at its end, by pages of 2 MiB and 20 MiB; every rest of 512 bytes stays usable, and the
free block at the end is used only if no other fits.

Among equal blocks torch 2.12 uses the oldest.  When a block is split, the part that is handed out
is a new one; of blocks that join, the one that was released last stays.

Blind spots: torch 2.13 and 2.14 are assumed to choose among equal blocks as 2.11 and 2.15 do;
segments are assumed to lie in the order in which they were reserved, which matters there, too;
other streams, pools of CUDA graphs and other settings of the allocator; when the device is full,
torch releases unused segments and tries again, so a run may survive on less than is reserved here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

GRANULE_BYTES = 512
"""Requests are rounded up to a multiple of this."""
SMALL_BYTES = 2 ** 20
"""The largest request that the small pool serves."""
SMALL_SEGMENT_BYTES = 2 * 2 ** 20
LARGE_SEGMENT_BYTES = 20 * 2 ** 20
"""Segments for requests above `SMALL_BYTES` and below `OWN_SEGMENT_BYTES`."""
OWN_SEGMENT_BYTES = 10 * 2 ** 20
"""Requests from this size on have a segment of their own, of their size rounded up."""
OWN_SEGMENT_GRANULE_BYTES = 2 * 2 ** 20


_FIRST_MADE_FIRST = ("2.12.",)
"""Versions of torch that use the oldest of equal blocks."""


def takes_first_made(torch_version: str) -> bool:
    """True if this version uses the oldest of equal blocks, not the one at the lowest address."""
    return torch_version.startswith(_FIRST_MADE_FIRST)


def rounded_bytes(size_bytes: int) -> int:
    """Bytes that a request counts for; 0 for an empty one."""
    return rounded_up(size_bytes, GRANULE_BYTES)


class CachingAllocator:
    """One device's memory as torch hands it out; mutable."""

    def __init__(self, *, expandable: bool = False, first_made: bool = False) -> None:
        """`expandable`: with expandable segments; `first_made`: see `takes_first_made`."""
        self.first_made = first_made
        self.blocks_made = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        """Bytes in segments; they never shrink, so this is also the peak."""
        self._end = 0  # of all addresses handed out so far
        kind = _ExpandablePool if expandable else _Pool
        self._small = kind(self, SMALL_SEGMENT_BYTES, least_rest_bytes=GRANULE_BYTES)
        self._large = kind(self, LARGE_SEGMENT_BYTES, least_rest_bytes=SMALL_BYTES + 1)

    def allocate(self, size_bytes: int) -> Handle:
        """Allocate a block of at least `size_bytes`, which must be above 0; returns the handle for
        `release`."""
        size = rounded_up(size_bytes, GRANULE_BYTES)
        block = (self._small if size <= SMALL_BYTES else self._large).take(size)
        self.allocated_bytes += block.size
        return block

    def release(self, block: Handle) -> None:
        """Release a block that `allocate` returned, once."""
        self.allocated_bytes -= block.size
        block.pool.give_back(block)

    def reserve(self, size_bytes: int) -> int:
        """Reserve a new segment; returns its address."""
        start, self._end = self._end, self._end + size_bytes
        self.reserved_bytes += size_bytes
        return start


class Handle:
    """A stretch of a segment, in use or free."""

    __slots__ = ("address", "free", "made", "next", "pool", "previous", "size")

    def __init__(self, pool: _Pool, address: int, size: int, previous: Handle | None = None,
                 next: Handle | None = None) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.previous, self.next = previous, next
        self.free = False
        self.made = pool.device.blocks_made  # number of blocks before it
        pool.device.blocks_made += 1

    @property
    def key(self) -> tuple[int, int]:
        """Sort key of free blocks."""
        return self.size, self.made if self.pool.device.first_made else self.address


class _Pool:
    """Segments for small requests, or for large ones."""

    def __init__(self, device: CachingAllocator, segment_bytes: int, least_rest_bytes: int) -> None:
        self.device, self.segment_bytes = device, segment_bytes
        self.least_rest_bytes = least_rest_bytes
        self.free: list[tuple[int, int]] = []  # keys of free blocks, ascending
        self.free_blocks: dict[tuple[int, int], Handle] = {}  # by key

    def take(self, size: int) -> Handle:
        """Take a block for a request of this size, already rounded."""
        place = self.fitting(size)
        block = self.new(size) if place is None else self.free_blocks.pop(self.free.pop(place))
        block.free = False
        rest = block.size - size
        if rest >= self.least_rest_bytes:
            after = block.next
            left = Handle(self, block.address + size, rest, block, after)
            if after is not None:
                after.previous = left
            block.next, block.size = left, size
            block.made, left.made = left.made, block.made
            self.put(left)
        return block

    def fitting(self, size: int) -> int | None:
        """Index in `free` of the block for the request; `None`: there is none."""
        place = bisect_left(self.free, (size, -1))
        return place if place < len(self.free) else None

    def new(self, size: int) -> Handle:
        """A block of a new segment."""
        if size >= OWN_SEGMENT_BYTES:
            length = rounded_up(size, OWN_SEGMENT_GRANULE_BYTES)
        else:
            length = self.segment_bytes
        return Handle(self, self.device.reserve(length), length)

    def give_back(self, block: Handle) -> None:
        """Free a block and merge it with its free neighbours."""
        before, after = block.previous, block.next
        if before is not None and before.free:
            self.withdraw(before)
            before.size += block.size
            before.made = block.made
            before.next = after
            if after is not None:
                after.previous = before
            block = before
        if after is not None and after.free:
            self.withdraw(after)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
        self.put(block)

    def put(self, block: Handle) -> None:
        """Insert a block into the free ones."""
        block.free = True
        insort(self.free, block.key)
        self.free_blocks[block.key] = block

    def withdraw(self, block: Handle) -> None:
        """Remove a block from the free ones."""
        del self.free[bisect_left(self.free, block.key)]
        del self.free_blocks[block.key]


class _ExpandablePool(_Pool):
    """One segment that grows at its end; addresses are counted from its start."""

    def __init__(self, device: CachingAllocator, segment_bytes: int, least_rest_bytes: int) -> None:
        super().__init__(device, segment_bytes, GRANULE_BYTES)
        self._unmapped = Handle(self, 0, 0)  # the end of the segment; never free

    def fitting(self, size: int) -> int | None:
        place = super().fitting(size)
        if place is not None and place + 1 < len(self.free) and (
                self.free_blocks[self.free[place]].next is self._unmapped):
            return place + 1  # the block at the end could grow: another one is preferred
        return place

    def new(self, size: int) -> Handle:
        end = self._unmapped
        last = end.previous
        if last is not None and last.free:
            self.withdraw(last)
        else:
            before, last = last, Handle(self, end.address, 0, last, end)
            if before is not None:
                before.next = last
            end.previous = last
        grown = rounded_up(size - last.size, self.segment_bytes)
        self.device.reserve(grown)
        end.address += grown
        last.size += grown
        return last


def replay(sizes: Sequence[int], events: Iterable[int], allocator: CachingAllocator,
           held: dict[int, Handle]) -> None:
    """Replay `events` (`i`: block i is made; `~i`: it is released) for blocks of these `sizes`;
    empty blocks are skipped.  `held`: the live blocks by number."""
    for event in events:
        if event >= 0:
            if sizes[event]:
                held[event] = allocator.allocate(sizes[event])
        elif sizes[~event]:
            allocator.release(held.pop(~event))


def rounded_up(size: int, multiple: int) -> int:
    """The smallest such multiple that is no smaller than `size`."""
    return -(-size // multiple) * multiple
