"""Keep, recompute or store on the host: the joint choice within a budget.

The search begins with the result of any algorithm that only recomputes.  Recomputations are then
given up, op by op, and what no longer fits is stored on the host, as long as waiting for copies
costs less.  So a schedule is never worse than that of recomputation alone.  Two
more orders are tried: the one that recomputes nothing, and the best one of the relaxation below.
The search is counted in moves, not timed.

The bound.  A transfer frees the memory of the storage that it moves, and nothing else.  Consider
the problem in which offloadable storages use memory only while an op reads or makes them: there,
every schedule with its transfers removed is a legal schedule that uses no more memory and costs no
more.  So a bound for that problem holds here.  The idea of one problem for both choices is that of
POFO (Beaumont et al., "Efficient combination of rematerialization and offloading for training
DNNs", NeurIPS 2021) and POET (Patil et al., ICML 2022), who solve it exactly, for chains and as a
MILP.

A result may be away between two consecutive reads.  The results to store are chosen greedily, by
how many runs over the budget a gap covers, larger results first.  Copies to the host begin as soon
as there is something to copy.  Memory is released when the copy has ended, or earlier, at the price
of waiting, where the budget requires it.  Copies back begin in the order in which they are read, as
early as link and budget allow.

Blind spots: the bound ignores the time of copies; an op is given up with all of its recomputations
or with none of them; a storage is away once, in its longest gap.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.solvers.actions import Action, Fetch, Order, Release, Schedule, Store, as_order
from planner.solvers.minimum import minimum_peak
from planner.solvers.problem import Op, Problem
from planner.solvers.simulator import simulate, unroll
from planner.solvers.task import Algorithm, Proposal, Task

_MOVES, _MOVED_RUNS = 400, 200_000
"""Moves of a search, and the total number of runs in all of its moves: the longer an order, the
fewer moves."""
_STEPS = 8
"""Recomputations are given up in this many parts before single ones are tried."""
_MARGINS = (0.0, 0.05, 0.1, 0.2)
"""Fractions of the budget that are stored in addition to the necessary bytes."""


def relaxed(problem: Problem) -> Problem:
    """Return the problem in which offloadable storages use memory only while an op uses them.  No
    schedule of `problem` with transfers costs less, or peaks lower, than the same runs do here."""
    storages = tuple(replace(storage, size_bytes=0) if storage.offloadable else storage
                     for storage in problem.storages)

    def touched(op: Op) -> int:
        """Lower bound on the offloadable bytes that exist while the op runs."""
        moved = [s for s in (*op.inputs, *op.outputs) if problem.storages[s].offloadable]
        shared = max((problem.storages[s].size_bytes for s in op.inplace), default=0)
        return max(0, sum(problem.storages[s].size_bytes for s in moved) - shared)

    return replace(problem, storages=storages, link=None, ops=tuple(
        replace(op, workspace_bytes=op.workspace_bytes + touched(op),
                inplace=tuple(s for s in op.inplace if storages[s].size_bytes
                              == storages[op.outputs[0]].size_bytes))
        for op in problem.ops))


def jointly(propose: Algorithm) -> Algorithm:
    """Extend an algorithm that only recomputes to one that also stores results on the host."""

    def propose_jointly(task: Task) -> Proposal:
        problem, seconds = task.problem, task.seconds_left
        alone = propose(replace(task, problem=replace(problem, link=None)))
        if rank(problem, task.budget_bytes, alone.schedule) <= (0, problem.keep_all_cost):
            return alone
        free = propose(replace(
            task, problem=relaxed(problem), deadline=time.monotonic() + seconds / 2,
            warm_start=None, ideas=()))
        orders = (as_order(alone.schedule), as_order(free.schedule), problem.keep_all_schedule)
        found = search(problem, task.budget_bytes, orders)
        if rank(problem, task.budget_bytes, found)[0]:
            # A schedule independent of the budget, so that a refusal's promise can be kept.
            least = minimum_peak(relaxed(problem), seed=task.seed)
            found = search(problem, task.budget_bytes, (*orders, least))
        task.report("stored on the host: "
                    f"{simulate(problem, found).cost / (problem.keep_all_cost or 1.0) - 1:.3%}")
        return Proposal(found, free.lower_bound, late=alone.late or free.late,
                        interrupted=alone.interrupted or free.interrupted)

    return propose_jointly


def search(problem: Problem, budget_bytes: int, orders: Iterable[Order]) -> Schedule:
    """Return the cheapest schedule found within the budget, else the one that comes nearest, among
    `orders` with some recomputations removed and storages on the host instead."""
    found = (_search_from(problem, budget_bytes, order) for order in dict.fromkeys(orders))
    return min(found, key=lambda each: each[0])[1]


def _search_from(problem: Problem, budget_bytes: int, order: Order
                 ) -> tuple[tuple[int, float], Schedule]:
    moves = min(_MOVES, _MOVED_RUNS // len(order) + _STEPS)

    def evaluated(dropped: Set[int], margin: float = 0.0) -> tuple[tuple[int, float], Schedule]:
        found = with_transfers(problem, _without(problem, order, dropped), budget_bytes,
                               int(margin * budget_bytes))
        return rank(problem, budget_bytes, found), found

    again = Counter(order)
    replayed = [op for op, runs in again.items() if runs > 1]
    made = {op: sum(problem.storages[s].size_bytes for s in problem.ops[op].outputs)
            for op in replayed}
    costs = {op: (again[op] - 1) * problem.ops[op].cost for op in replayed}
    # The op with the highest cost per byte freed is given up first.
    replayed.sort(key=lambda op: (-costs[op] / (made[op] + 1), op))
    best, dropped = evaluated(frozenset()), frozenset[int]()
    for step in range(1, _STEPS + 1):
        some = frozenset(replayed[:len(replayed) * step // _STEPS])
        found = evaluated(some)
        if found[0] < best[0]:
            best, dropped = found, some
    replayed.sort(key=lambda op: (-costs[op], op))
    moves -= _STEPS
    improved = True
    while improved and moves > 0:
        improved = False
        for op in replayed[:moves]:
            found = evaluated(dropped ^ {op})
            if found[0] < best[0]:
                best, dropped, improved = found, dropped ^ {op}, True
        moves -= len(replayed)
    for margin in _MARGINS[1:]:
        best = min(best, evaluated(dropped, margin), key=lambda each: each[0])
    return best


def _without(problem: Problem, order: Order, dropped: Set[int]) -> Order:
    """Return the order without the recomputations of these ops, and without those that then serve
    none."""
    seen: set[int] = set()
    is_first = [not (op in seen or seen.add(op)) for op in order]  # type: ignore[func-returns-value]
    wanted: set[int] = set()
    left: list[int] = []
    for op, first in zip(reversed(order), reversed(is_first), strict=True):
        described = problem.ops[op]
        if not first and (op in dropped or wanted.isdisjoint(described.outputs)):
            continue
        wanted.difference_update(described.outputs)
        wanted.update(described.inputs)
        left.append(op)
    return tuple(reversed(left))


def rank(problem: Problem, budget_bytes: int, schedule: Iterable[Action | int]
          ) -> tuple[int, float]:
    """Sort key, smaller is better: the excess over the budget, then the cost."""
    peak, cost = simulate(problem, tuple(schedule))
    return max(0, peak - budget_bytes), cost


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
                   ) -> Schedule:
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

    def run(self) -> Schedule:
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
