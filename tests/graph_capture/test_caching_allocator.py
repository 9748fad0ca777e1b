"""The model of torch's caching allocator: its documented rules, a slow one, torch's own.

`recorded_allocations.json` holds what the allocators of torch 2.11.0 and 2.15.0, alike, and that of
2.12.1 said of the same requests (`benchmarks/allocator.py`).
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner._graph_capture.memory.caching_allocator import (
    CachingAllocator,
    replay,
    rounded_bytes,
    takes_first_made,
)
from tests.support.slow_allocator import SlowAllocator

MIB = 2 ** 20
RECORDED = Path(__file__).parent / "recorded_allocations.json"

EDGES = (1, 511, 512, 513, 4096, 300_000, MIB - 1, MIB, MIB + 1, 3 * MIB, 10 * MIB - 1, 10 * MIB,
         10 * MIB + 1, 19 * MIB, 20 * MIB, 33 * MIB + 7)


def reserved_after(*sizes, expandable=False):
    allocator = CachingAllocator(expandable=expandable)
    for size in sizes:
        allocator.allocate(size)
    return allocator.reserved_bytes


@st.composite
def loops(draw):
    """Sizes, and events that make each block once and release some."""
    sizes = draw(st.lists(st.one_of(st.sampled_from(EDGES), st.integers(1, 40 * MIB)),
                          min_size=1, max_size=40))
    events, alive = [], []
    for number in range(len(sizes)):
        events.append(number)
        alive.append(number)
        for _ in range(draw(st.integers(0, 2))):
            if alive:
                events.append(~alive.pop(draw(st.integers(0, len(alive) - 1))))
    return sizes, events, alive


def test_requests_count_in_steps_of_512_bytes():
    assert [rounded_bytes(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    allocator = CachingAllocator()
    allocator.allocate(1)
    allocator.allocate(513)
    assert allocator.allocated_bytes == 512 + 1024


def test_small_requests_share_segments_of_2_mib():
    assert reserved_after(1) == reserved_after(1, MIB) == 2 * MIB
    assert reserved_after(MIB, MIB, 1) == 4 * MIB


def test_requests_below_10_mib_share_segments_of_20_mib():
    assert reserved_after(MIB + 1) == reserved_after(9 * MIB, 9 * MIB) == 20 * MIB
    assert reserved_after(9 * MIB, 9 * MIB, 3 * MIB) == 40 * MIB
    assert reserved_after(10 * MIB - 1) == 10 * MIB  # 10 MiB when it is rounded up


def free_blocks(allocator):
    """Return address and size of every free block, by address."""
    return sorted((block.address, block.size) for pool in (allocator._small, allocator._large)
                  for block in pool.free_blocks.values())


def test_larger_requests_have_segments_in_steps_of_2_mib():
    assert reserved_after(10 * MIB) == 10 * MIB
    assert reserved_after(10 * MIB + 1) == 12 * MIB
    assert reserved_after(100 * MIB, 101 * MIB) == 202 * MIB


def test_a_rest_of_up_to_1_mib_of_a_large_block_is_not_split_off():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(29 * MIB)
    assert allocator.allocated_bytes == 30 * MIB and not free_blocks(allocator)
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(29 * MIB - 512)
    assert allocator.allocated_bytes == 29 * MIB - 512
    assert [size for _, size in free_blocks(allocator)] == [MIB + 512]


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (60, 40, 50)]
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(39 * MIB).address == blocks[1].address
    assert allocator.reserved_bytes == 150 * MIB


def test_large_blocks_do_not_serve_small_requests():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 32 * MIB


def test_free_neighbours_join_and_segments_do_not():
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(6 * MIB) for _ in range(3))
    allocator.release(first)
    allocator.release(third)
    assert len(free_blocks(allocator)) == 2
    allocator.release(second)
    assert free_blocks(allocator) == [(0, 20 * MIB)]
    other = allocator.allocate(30 * MIB)
    allocator.release(other)
    allocator.allocate(45 * MIB)
    assert allocator.reserved_bytes == (20 + 30 + 46) * MIB


def test_an_expandable_segment_grows_at_its_end():
    assert reserved_after(1, expandable=True) == 2 * MIB
    assert reserved_after(2 * MIB, expandable=True) == 20 * MIB
    assert reserved_after(30 * MIB, 30 * MIB, expandable=True) == 60 * MIB
    allocator = CachingAllocator(expandable=True)
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(45 * MIB)  # 40 MiB were there
    assert allocator.reserved_bytes == 60 * MIB


def test_the_end_of_an_expandable_segment_is_taken_last():
    allocator = CachingAllocator(expandable=True)
    early = allocator.allocate(30 * MIB)
    allocator.allocate(8 * MIB)  # 2 MiB are left at the end
    allocator.release(early)
    assert allocator.allocate(2 * MIB).address == early.address


@pytest.mark.parametrize("expandable", [False, True])
@given(loops())
def test_as_a_slow_allocator_has_it(expandable, loop):
    sizes, events, _ = loop
    fast, slow, held = CachingAllocator(expandable=expandable), SlowAllocator(expandable), {}
    for event in events:
        replay(sizes, [event], fast, held)
        if event >= 0:
            slow.allocate(event, sizes[event])
        else:
            slow.release(~event)
        assert (fast.allocated_bytes, fast.reserved_bytes) == (slow.allocated, slow.reserved)
        assert fast.allocated_bytes <= fast.reserved_bytes


@pytest.mark.parametrize("expandable", [False, True])
@given(loops())
def test_the_same_again_stops_to_reserve_more_and_leaves_whole_segments(expandable, loop):
    sizes, events, alive = loop
    allocator, reserved = CachingAllocator(expandable=expandable), []
    for _ in range(12):
        held = {}
        replay(sizes, [*events, *(~number for number in alive)], allocator, held)
        assert not held and allocator.allocated_bytes == 0
        reserved.append(allocator.reserved_bytes)
    assert reserved[-2] == reserved[-1]
    assert sum(size for _, size in free_blocks(allocator)) == reserved[-1]
    if expandable:
        assert len(free_blocks(allocator)) <= 2


@given(loops())
def test_without_releases_an_expandable_segment_wastes_less_than_a_page_of_each_kind(loop):
    sizes, _, _ = loop
    reserved = reserved_after(*sizes, expandable=True)
    assert reserved < sum(map(rounded_bytes, sizes)) + 22 * MIB


def test_of_equal_blocks_that_at_the_lowest_address_or_the_first_made_is_taken():
    for version, place in (("2.11.0", 0), ("2.12.1+cu130", 1), ("2.15.0", 0)):
        allocator = CachingAllocator(first_made=takes_first_made(version))
        blocks = [allocator.allocate(30 * MIB) for _ in range(2)]
        addresses = [block.address for block in blocks]
        for block in blocks:
            allocator.release(block)
        allocator.release(allocator.allocate(25 * MIB))  # makes a block where the first was
        assert allocator.allocate(30 * MIB).address == addresses[place]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.15.0"])
@pytest.mark.parametrize("expandable", [False, True])
def test_as_torch_has_it(expandable, version):
    for recorded in json.loads(RECORDED.read_text(encoding="utf-8")):
        sizes, events = recorded["sizes"], recorded["events"]
        allocator = CachingAllocator(expandable=expandable, first_made=takes_first_made(version))
        held, seen, peak = {}, [], 0
        for number, event in enumerate(events):
            before = allocator.reserved_bytes
            replay(sizes, [event], allocator, held)
            peak = max(peak, allocator.allocated_bytes)
            if allocator.reserved_bytes != before:
                seen.append([number, allocator.reserved_bytes, allocator.allocated_bytes])
        of_torch = recorded[version]["expandable" if expandable else "plain"]
        assert seen == of_torch["reserved"]
        assert peak == of_torch["peak_allocated_bytes"]
