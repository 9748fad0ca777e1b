"""The chain of narrow frontiers of a computation: the places that few bytes cross.

Cut the part of the computation that may be recomputed after some op `pivot` between two consecutive
ops.  The *frontier* there is the set of storages that cross: made before and read after, by ops
that may be recomputed.  With a frontier retained, nothing before it is ever recomputed.  Storages
that can never be recomputed are retained anyway and count as free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.solvers.problem import Problem

WAIST = 2.5
"""A frontier this many times as wide as its narrower neighbours still bounds a block."""


@dataclass(frozen=True, slots=True)
class Region:
    """The ops up to `pivot` that may have to run again after it."""

    pivot: int
    ops: tuple[int, ...]
    """Recomputable ops whose outputs are needed after the pivot, or needed to recompute such
    outputs; in order."""
    needed: tuple[int, ...]
    """Storages made up to the pivot that first runs after the pivot read, ascending."""
    forced: frozenset[int]
    """Storages that must be retained past the pivot because no op may recompute them."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """A place between two ops, and the storages that cross it."""

    position: int
    """The first op after it."""
    storages: frozenset[int]
    size_bytes: int


def region_after(problem: Problem, pivot: int) -> Region:
    """Return the ops and storages that may be recomputed after the first run of op `pivot`; O(ops +
    reads)."""
    needed = reads_across(problem, pivot, len(problem))
    again, _, forced = recomputations(problem, needed, pivot, len(problem))
    return Region(pivot, tuple(sorted(again)), tuple(sorted(needed)), frozenset(forced))


def reads_across(problem: Problem, pivot: int, end: int) -> set[int]:
    """Return the storages made up to op `pivot` that first runs after it read, up to that of `end`.
    Storages kept to the end always exist and are left out."""
    storages = problem.storages
    return {s for op in problem.ops[pivot + 1:end + 1] for s in op.inputs
            if storages[s].producer <= pivot and not storages[s].kept_to_end}


def recomputations(problem: Problem, wanted: Iterable[int], pivot: int, end: int
                   ) -> tuple[set[int], set[int], set[int]]:
    """Return the ops that may run again between the first runs of `pivot` and `end` to make the
    wanted storages, all storages that may serve them so, and those among them that no op may make
    again there."""
    ops, storages = problem.ops, problem.storages
    stretch = slice(problem.segment_before(pivot + 1), problem.segment_before(end) + 1)
    allowed = {home for segment in problem.segments[stretch] for home in segment.replays}
    again, forced, seen = set[int](), set[int](), set(wanted)
    stack = list(seen)
    while stack:
        storage = stack.pop()
        producer = storages[storage].producer
        if not ops[producer].recomputable or problem.segment_of[producer] not in allowed:
            forced.add(storage)
            continue
        again.add(producer)
        for source in ops[producer].inputs:
            if source not in seen and not storages[source].kept_to_end:
                seen.add(source)
                stack.append(source)
    return again, seen, forced


def frontiers(problem: Problem, region: Region) -> tuple[Frontier, ...]:
    """Return the frontier before each op of the region except its first, in order."""
    members = set(region.ops)
    last_read = {}
    for index in region.ops:
        for storage in problem.ops[index].inputs:
            if problem.storages[storage].producer in members and storage not in region.forced:
                last_read[storage] = index
    crossing: set[int] = set()
    result = []
    for before, index in zip(region.ops, region.ops[1:], strict=False):
        crossing.update(s for s in problem.ops[before].outputs if last_read.get(s, -1) >= index)
        crossing = {s for s in crossing if last_read[s] >= index}
        size = sum(problem.storages[s].size_bytes for s in crossing)
        result.append(Frontier(index, frozenset(crossing), size))
    return tuple(result)


def waists(chain: Sequence[Frontier]) -> tuple[Frontier, ...]:
    """Return the frontiers that bound blocks.  They are not much wider than the nearest narrower
    ones on both sides: the residual stream between the layers of a network, but not within them."""
    accepted: list[Frontier] = []
    for frontier in sorted(chain, key=lambda f: (f.size_bytes, f.position)):
        at = bisect_left(accepted, frontier.position, key=lambda f: f.position)
        inside = 0 < at < len(accepted)
        if not inside or frontier.size_bytes <= WAIST * max(
                accepted[at - 1].size_bytes, accepted[at].size_bytes):
            accepted.insert(at, frontier)
    return tuple(accepted)


def narrow_frontiers(problem: Problem, region: Region, limit: int) -> tuple[Frontier, ...]:
    """Return at most `limit` frontiers, those that are locally narrowest, in order.

    A frontier is a candidate if neither neighbour is narrower.  If there are too many candidates,
    the narrowest in each of `limit` stretches of equal cost stay.
    """
    chain = frontiers(problem, region)
    sizes = [f.size_bytes for f in chain]
    local = [f for i, f in enumerate(chain)
             if (i == 0 or sizes[i - 1] >= sizes[i])
             and (i + 1 == len(chain) or sizes[i + 1] >= sizes[i])]
    if len(local) <= limit:
        return tuple(local)
    total = sum(problem.ops[i].cost for i in region.ops) or 1.0
    done, stretch_of = 0.0, {}
    for index in region.ops:
        stretch_of[index] = min(limit - 1, int(limit * done / total))
        done += problem.ops[index].cost
    best: dict[int, Frontier] = {}
    for frontier in local:
        stretch = stretch_of[frontier.position]
        if stretch not in best or frontier.size_bytes < best[stretch].size_bytes:
            best[stretch] = frontier
    return tuple(best[stretch] for stretch in sorted(best))
