"""Transfers for a given order of runs: the storages on the host, and where copies begin and end.

The model of the world: a result may be away between two consecutive reads.  The results to store
are chosen greedily, by how many runs over the budget a gap covers, larger results first.  Copies to
the host begin as soon as there is something to copy.  Memory is released when the copy has ended,
or earlier, at the price of waiting, where the budget requires it.  Copies back begin in the order
in which they are read, as early as link and budget allow.

Blind spots: a storage is away once, in its longest gap; nothing is stored only so that another copy
may come back earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.solvers.actions import Action, Fetch, Order, Release, Store
from planner.solvers.problem import Problem
from planner.solvers.simulator import unroll


@dataclass(frozen=True, slots=True)
class Gap:
    """The gap between two reads in which a storage may be away; positions count runs."""

    storage: int
    size_bytes: int
    made: int
    """The run that makes the result read on both sides."""
    leaves: int
    """The last run before the gap that reads it (or makes it)."""
    returns: int
    """The first run after the gap that reads it."""
    release_by: int
    """The last run before which it may be released."""
    fetch_from: int
    """The first run before which it may be fetched."""


def longest_gaps(problem: Problem, order: Order, where: Sequence[int]) -> list[Gap]:
    """Return, for each offloadable storage that has one, the longest gap in which it may be away.
    `where`: the segment of each run."""
    first_in: dict[int, int] = {}
    last_in: dict[int, int] = {}
    for position, segment in enumerate(where):
        first_in.setdefault(segment, position)
        last_in[segment] = position
    allowed = [frozenset((here, *segment.replays))
               for here, segment in enumerate(problem.segments)]
    best: dict[int, Gap] = {}
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for position, index in enumerate(order):
        op = problem.ops[index]
        for storage in op.inputs:
            described = problem.storages[storage]
            born, before = made[storage], read[storage]
            read[storage] = position
            if not described.offloadable or not described.size_bytes:
                continue
            home = problem.segment_of[described.producer]
            leaving, coming = where[born + 1], where[position]
            if home not in allowed[leaving] or home not in allowed[coming]:
                continue
            gap = Gap(storage, described.size_bytes, born, before, position, last_in[leaving],
                      max(first_in[coming], before + 1))
            known = best.get(storage)
            if before + 1 <= min(gap.release_by, position - 1) and (
                    known is None or position - before > known.returns - known.leaves):
                best[storage] = gap
        for storage in op.outputs:
            made[storage] = read[storage] = position
    return [best[storage] for storage in sorted(best)]


def with_transfers(problem: Problem, order: Order, budget_bytes: int, margin_bytes: int = 0
                   ) -> tuple[Action | int, ...]:
    """Return `order` with transfers that bring its peak down to `budget_bytes`, or as near as they
    can.

    `margin_bytes`: bytes stored in addition to the necessary ones, which leave headroom for copies
    that come back early.
    """
    timeline = unroll(problem, order)
    memory = np.array(timeline.memory_bytes, dtype=np.int64)
    if memory.max() <= budget_bytes:
        return order
    gaps = longest_gaps(problem, order, timeline.segments)
    chosen = _choose(gaps, memory, budget_bytes - margin_bytes)
    return _Walk(problem, order, timeline.segments, chosen, memory, budget_bytes).run()


def _choose(gaps: list[Gap], memory: NDArray[np.int64], budget_bytes: int) -> list[Gap]:
    """Choose the gaps to use.  `memory` becomes that of the runs if copies took no time."""
    leaves = np.array([gap.leaves for gap in gaps], dtype=np.int64)
    returns = np.array([gap.returns for gap in gaps], dtype=np.int64)
    sizes = np.array([gap.size_bytes for gap in gaps], dtype=np.int64)
    free = np.ones(len(gaps), dtype=bool)
    over = memory > budget_bytes
    chosen: list[int] = []
    while over.any():
        fullest = int(np.argmax(np.where(over, memory, -1)))
        covering = np.flatnonzero(free & (leaves < fullest) & (fullest < returns))
        if not len(covering):
            over[fullest] = False  # no transfer helps there
            continue
        counts = np.concatenate(([0], np.cumsum(over)))
        covered = counts[returns[covering]] - counts[leaves[covering] + 1]
        taken = int(covering[np.lexsort((-sizes[covering], -covered))[0]])
        free[taken] = False
        chosen.append(taken)
        span = slice(int(leaves[taken]) + 1, int(returns[taken]))
        memory[span] -= sizes[taken]
        over[span] &= memory[span] > budget_bytes
    limit = max(budget_bytes, int(memory.max()))
    for taken in sorted(chosen, key=lambda each: (int(sizes[each]), each)):
        span = slice(int(leaves[taken]) + 1, int(returns[taken]))
        if memory[span].max() + sizes[taken] <= limit:
            memory[span] += sizes[taken]
            free[taken] = True
    return [gaps[taken] for taken in sorted(chosen) if not free[taken]]


class _Walk:
    """One pass along the runs, in time."""

    def __init__(self, problem: Problem, order: Order, where: Sequence[int], chosen: list[Gap],
                 memory: NDArray[np.int64], budget_bytes: int) -> None:
        assert problem.link is not None
        self.problem, self.link, self.order, self.where = problem, problem.link, order, where
        self.memory, self.budget_bytes = memory, budget_bytes
        self.leaving: dict[int, list[Gap]] = {}
        for gap in chosen:
            self.leaving.setdefault(gap.made + 1, []).append(gap)
        self.coming = deque(sorted(chosen, key=lambda gap: (gap.returns, gap.storage)))
        self.stored: dict[Gap, float] = {}  # with the end of the copy, in the order of those
        self.arrivals: dict[int, float] = {}
        self.now = self.outward_free = self.inward_free = 0.0
        self.blocked_until = -1
        self.actions: list[Action | int] = []

    def run(self) -> tuple[Action | int, ...]:
        for position, index in enumerate(self.order):
            for gap in self.leaving.get(position, ()):
                self.outward_free = max(self.now, self.outward_free) + self.link.cost(
                    gap.size_bytes)
                self.stored[gap] = self.outward_free
                self.actions.append(Store(gap.storage))
            self._release(position)
            self._fetch(position)
            op = self.problem.ops[index]
            ready = max((self.arrivals.get(s, self.now) for s in op.inputs), default=self.now)
            self.now = max(self.now, ready) + op.cost
            for storage in op.outputs:
                self.arrivals.pop(storage, None)
            self.actions.append(index)
        return tuple(self.actions)

    def _release(self, position: int) -> None:
        waiting = [gap for gap in self.stored if gap.leaves < position]
        held = int(self.memory[position]) + sum(gap.size_bytes for gap in waiting)
        for gap in waiting:
            if (self.stored[gap] <= self.now or position == gap.release_by
                    or position == gap.returns - 1 or held > self.budget_bytes):
                self.now = max(self.now, self.stored.pop(gap))
                self.actions.append(Release(gap.storage))
                held -= gap.size_bytes

    def _fetch(self, position: int) -> None:
        cost = self.problem.ops[self.order[position]].cost
        while self.coming:
            gap = self.coming[0]
            if position < gap.returns and (
                    position < gap.fetch_from or position <= gap.leaves or gap in self.stored
                    or position <= self.blocked_until
                    or self.inward_free > self.now + cost or not self._has_headroom(gap, position)):
                return
            self.coming.popleft()
            self.blocked_until = -1
            self.memory[position:gap.returns] += gap.size_bytes
            self.inward_free = max(self.now, self.inward_free) + self.link.cost(gap.size_bytes)
            self.arrivals[gap.storage] = self.inward_free
            self.actions.append(Fetch(gap.storage))

    def _has_headroom(self, gap: Gap, position: int) -> bool:
        ahead = self.memory[position:gap.returns] + gap.size_bytes
        ahead[0] += sum(each.size_bytes for each in self.stored if each.leaves < position)
        over = np.flatnonzero(ahead > self.budget_bytes)
        if len(over):
            self.blocked_until = position + int(over[-1])
        return not len(over)
