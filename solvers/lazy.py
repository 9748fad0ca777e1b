"""Lazy rematerialization: walk the ops in order, evict storages when memory is short, recompute
them when they are read.

The eviction score is that of Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021): evict a
storage that is cheap to recompute, large, and not needed for long.  Unlike an online algorithm this
one knows the whole future. "Not needed for long" is therefore the distance to the next read instead
of the time since the last one, and a storage that is never read again goes first.

The model of the world is `solvers.simulator`'s, seen from the safe side: the walk keeps a storage
alive until it evicts it, while the simulator ends its life with its last read.  Replay state is the
exception (`Op.replay_state_bytes` is not counted here), so callers evaluate the result by the
simulator.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from planner.solvers.problem import Order, Problem


@dataclass(frozen=True, slots=True)
class EvictionHeuristic:
    """Exponents of the score cost^a / (size^b * distance^c); the lowest score is evicted."""

    cost: float = 1.0
    size: float = 1.0
    distance: float = 1.0
    keep_sources: bool = False
    """True if results that cannot be recomputed stay alive as long as something made from them is
    read, so that this can be evicted."""


_WORK_PER_OP, _WORK_PER_RUN, _WORK_PER_WANTED = 2e-5, 1e-5, 3e-6
_WORK_PER_EVICTION, _WORK_PER_VICTIM = 3e-5, 1e-5


class _NoHeadroom(Exception):
    """The walk cannot go on within its budget."""


def lazy_schedule(problem: Problem, budget_bytes: int) -> Order | None:
    """Return a legal schedule that aims at `budget_bytes`, or None if the walk runs out of
    headroom."""
    return counted_walk(problem, budget_bytes, EvictionHeuristic(), 12 * len(problem) + 1000)[0]


def counted_walk(problem: Problem, budget_bytes: int, heuristic: EvictionHeuristic, max_runs: int,
                 *, max_work: float = math.inf, checkpoints: Collection[int] = ()
                 ) -> tuple[Order | None, float]:
    """Like `lazy_schedule`, but also return the work of the walk (see `solvers.milp.MilpResult`),
    which gives up after `max_runs` runs or `max_work`.  Storages of `checkpoints` stay alive until
    their last read."""
    walk = _Walk(problem, budget_bytes, heuristic, max_runs, max_work)
    walk.checkpoint[list(checkpoints)] = True
    try:
        for op in range(len(problem)):
            walk.first_run(op)
    except _NoHeadroom:
        return None, walk.work
    return tuple(walk.schedule), walk.work


@dataclass(slots=True)
class _Frame:
    """A run that waits for inputs to be recomputed."""

    op: int
    again: bool
    missing: list[int]


class _Walk:
    def __init__(self, problem: Problem, budget_bytes: int, heuristic: EvictionHeuristic,
                 max_runs: int, max_work: float) -> None:
        self.work = _WORK_PER_OP * len(problem)
        self.max_work = max_work
        self.problem = problem
        self.budget = budget_bytes
        self.max_runs = max_runs
        self.heuristic = heuristic
        self.schedule: list[int] = []
        self.used = 0  # bytes alive
        count = len(problem.storages)
        self.size = [storage.size_bytes for storage in problem.storages]
        self.producer = [storage.producer for storage in problem.storages]
        self.held = np.zeros(count, dtype=bool)
        self.locks = np.zeros(count, dtype=np.int64)
        self.born_in = [-1] * count  # segment in which the live instance was made
        self.stage = 0  # the op whose first run comes next
        self.never = len(problem) + 1
        # The next and the last first run that reads a storage, directly or to recompute what is
        # evicted.
        self.cursor = [0] * count
        self.next_read = np.full(count, self.never, dtype=np.int64)
        self.wanted_next = np.full(count, -1, dtype=np.int64)
        self.wanted_last = np.full(count, -1, dtype=np.int64)
        for storage, readers in enumerate(problem.consumers):
            if readers:
                self.next_read[storage] = readers[0]
        if heuristic.keep_sources:
            for storage, last in problem.sources:
                self.wanted_next[storage] = self.wanted_last[storage] = last
        self.neighborhood = EvictedNeighborhood(problem)
        self.base = np.array([float(max(s, 1)) ** heuristic.size for s in self.size])
        self.evictable = np.array([not s.kept_to_end and s.size_bytes > 0
                                   for s in problem.storages], dtype=bool)
        self.checkpoint = np.zeros(count, dtype=bool)
        self.free_replay = _replayable_from_nothing(problem)

    def first_run(self, op: int) -> None:
        self.stage = op
        self._run(op)
        for storage in self.problem.ops[op].inputs:
            readers = self.problem.consumers[storage]
            cursor = self.cursor[storage]
            while cursor < len(readers) and readers[cursor] <= op:
                cursor += 1
            self.cursor[storage] = cursor
            self.next_read[storage] = readers[cursor] if cursor < len(readers) else self.never
        for storage in (*self.problem.ops[op].inputs, *self.problem.ops[op].outputs):
            if self.held[storage] and self._next_use(storage, op + 1) == self.never:
                self._drop_if_dead(storage)

    def _run(self, op: int) -> None:
        """Make the first run of `op`, after recomputing its inputs and theirs."""
        frames = [self._frame(op, again=False)]
        while frames:
            frame = frames[-1]
            if frame.missing:
                storage = frame.missing[-1]
                if not self.held[storage]:
                    producer = self.producer[storage]
                    if not self.problem.may_replay(producer, self.stage):
                        raise _NoHeadroom
                    frames.append(self._frame(producer, again=True))
                    continue
                frame.missing.pop()
                self.locks[storage] += 1
                continue
            frames.pop()
            self._execute(frame)

    def _frame(self, op: int, again: bool) -> _Frame:
        """Lock the available inputs; the others are to be recomputed."""
        missing = []
        for storage in reversed(self.problem.ops[op].inputs):
            if self.held[storage]:
                self.locks[storage] += 1
            else:
                missing.append(storage)
        return _Frame(op, again, missing)

    def _execute(self, frame: _Frame) -> None:
        """Run an op whose inputs are all available and locked."""
        described = self.problem.ops[frame.op]
        self.work += _WORK_PER_RUN
        if len(self.schedule) >= self.max_runs or self.work > self.max_work:
            raise _NoHeadroom
        self._make_headroom(frame.op, frame.again)
        self.schedule.append(frame.op)
        for storage in described.inputs:
            self.locks[storage] -= 1
        here = self.problem.segment_before(self.stage)
        for storage in described.outputs:
            if not self.held[storage]:
                self._hold(storage)
            self.born_in[storage] = here
        if frame.again:
            for storage in described.inputs:
                self._drop_if_dead(storage)

    def _make_headroom(self, op: int, again: bool) -> None:
        described = self.problem.ops[op]
        need = described.workspace_bytes + sum(
            self.size[s] for s in described.outputs
            if not self.held[s] or (again and self.problem.storages[s].kept_to_end))
        here = self.problem.segment_before(self.stage)
        candidate = next((s for s in described.inplace if self.locks[s] == 1 and self.evictable[s]
                          and self.born_in[s] == here), None)
        after = self.stage + (not again)  # uses from then on are not those of this run
        if candidate is not None and self._next_use(candidate, after) >= self.never:
            self._drop(candidate)
            candidate = None
        if self.used + need <= self.budget:
            return
        # Sibling outputs of a replay stay where they are while their op runs again.
        barred = [s for s in described.outputs if self.held[s]]
        for storage in barred:
            self.locks[storage] += 1
        try:
            try:
                self._evict_until(self.budget - need)
            except _NoHeadroom:
                if (candidate is None or self.checkpoint[candidate]
                        or not self._may_evict(candidate, after, {})):
                    raise
                self._evict(candidate, after)
                self._evict_until(self.budget - need)
        finally:
            for storage in barred:
                self.locks[storage] -= 1

    def _evict_until(self, limit: int) -> None:
        if self.used <= limit:
            return
        self.work += _WORK_PER_EVICTION
        victims = np.flatnonzero(self.held & self.evictable & (self.locks == 0))
        if not len(victims):
            raise _NoHeadroom
        now = self.stage
        use = self._next_uses(victims)
        spared = self.checkpoint[victims] & (use < self.never)
        victims, use = victims[~spared], use[~spared]
        dead = use >= self.never
        heuristic = self.heuristic
        scores = (np.maximum(self.neighborhood.price[victims], 1e-9) ** heuristic.cost
                  / (self.base[victims] * (use - now + 1.0) ** heuristic.distance))
        scores[dead] = 0.0
        known: dict[tuple[int, int], bool] = {}
        for index in np.argsort(scores, kind="stable"):
            storage = int(victims[index])
            self.work += _WORK_PER_VICTIM
            if self._may_evict(storage, now, known):
                self._evict(storage, now)
                if self.used <= limit:
                    return
        raise _NoHeadroom

    def _next_uses(self, storages: np.ndarray) -> np.ndarray:
        """Like `_next_use`, for an array of storages and from the present stage on."""
        now = self.stage
        wanted = self.wanted_next[storages]
        wanted = np.where(wanted >= now, wanted, self.wanted_last[storages])
        wanted = np.where(wanted >= now, wanted, self.never)
        upcoming: np.ndarray = np.minimum(self.next_read[storages], wanted)
        return upcoming

    def _next_use(self, storage: int, start: int) -> int:
        """Return the first stage from `start` on that reads the storage, also to recompute an
        evicted one."""
        direct = int(self.next_read[storage])
        if direct < start:  # read by the run in progress: look behind it
            cursor = self.cursor[storage]
            later = [reader for reader in self.problem.consumers[storage][cursor:cursor + 2]
                     if reader >= start]
            direct = later[0] if later else self.never
        for wanted in (int(self.wanted_next[storage]), int(self.wanted_last[storage])):
            if wanted >= start:
                return min(direct, wanted)
        return direct

    def _may_evict(self, storage: int, start: int, known: dict[tuple[int, int], bool]) -> bool:
        """Return whether the storage can be recomputed for each of its uses from `start` on.
        `known` caches answers that stay true while only evictions happen."""
        uses = {self.problem.segment_of[reader]
                for reader in self.problem.consumers[storage][self.cursor[storage]:]
                if reader >= start}
        uses.update(self._wanted_in(storage, start))
        return all(self._recomputable(self.producer[storage], segment, known) for segment in uses)

    def _wanted_in(self, storage: int, start: int) -> list[int]:
        """Return the segments from `start` on in which an evicted storage is recomputed from this
        one."""
        return [self.problem.segment_of[int(wanted[storage])]
                for wanted in (self.wanted_next, self.wanted_last) if wanted[storage] >= start]

    def _recomputable(self, op: int, segment: int, known: dict[tuple[int, int], bool]) -> bool:
        """Return whether `op` can be recomputed in the segment from live storages."""
        todo = [op]
        while todo:
            here = todo[-1]
            if (here, segment) in known:
                todo.pop()
                continue
            if self.free_replay[segment][here]:
                known[here, segment] = True
                continue
            problem = self.problem
            if (not problem.ops[here].recomputable
                    or problem.segment_of[here] not in problem.segments[segment].replays):
                known[here, segment] = False
                continue
            # A storage that is evicted but needed there was found recomputable at its eviction.
            open_inputs = [self.producer[s] for s in problem.ops[here].inputs
                           if not self.held[s] and segment not in self._wanted_in(s, self.stage)]
            unknown = [p for p in open_inputs if (p, segment) not in known]
            if unknown:
                todo.extend(unknown)
            else:
                known[here, segment] = all(known[p, segment] for p in open_inputs)
        return known[op, segment]

    def _hold(self, storage: int) -> None:
        self.held[storage] = True
        self.used += self.size[storage]
        self.neighborhood.fill(storage)

    def _drop(self, storage: int) -> None:
        self.held[storage] = False
        self.used -= self.size[storage]

    def _drop_if_dead(self, storage: int) -> None:
        if (self.held[storage] and self.evictable[storage] and not self.locks[storage]
                and not self.problem.consumers[storage][self.cursor[storage]:]
                and self.wanted_last[storage] < self.stage):
            self._drop(storage)

    def _evict(self, storage: int, start: int) -> None:
        next_use = self._next_use(storage, start)
        self._drop(storage)
        if next_use < self.never:
            self.neighborhood.open(storage)
            self._want_inputs(storage, next_use, self._last_use(storage))

    def _last_use(self, storage: int) -> int:
        readers = self.problem.consumers[storage]
        return max(readers[-1] if readers else -1, int(self.wanted_last[storage]))

    def _want_inputs(self, storage: int, first: int, last: int) -> None:
        """Record that the inputs of the storage's producer are needed to recompute it."""
        todo = [storage]
        while todo:
            self.work += _WORK_PER_WANTED
            for source in self.problem.ops[self.producer[todo.pop()]].inputs:
                earlier = int(self.wanted_next[source])
                fresh_next = first if earlier < self.stage else min(earlier, first)
                fresh_last = max(int(self.wanted_last[source]), last)
                if (fresh_next, fresh_last) == (earlier, int(self.wanted_last[source])):
                    continue
                self.wanted_next[source], self.wanted_last[source] = fresh_next, fresh_last
                if not self.held[source]:
                    self.neighborhood.open(source)
                    todo.append(source)


def _replayable_from_nothing(problem: Problem) -> list[list[bool]]:
    """Per segment and op, whether the op can be recomputed there from nothing."""
    table = []
    for segment in problem.segments:
        row: list[bool] = []
        for index, op in enumerate(problem.ops):
            row.append(op.recomputable and problem.segment_of[index] in segment.replays
                       and all(row[problem.storages[s].producer] for s in op.inputs))
        table.append(row)
    return table


_LARGE_RIM = 64


class EvictedNeighborhood:
    """Connected sets of storages that are evicted but needed later, and the cost to recompute them.

    Evicting a storage joins the neighborhoods next to it, so its cost is theirs and its own.  This
    keeps checkpoints apart on a chain (the neighborhood of Dynamic Tensor Rematerialization).  A
    union-find that never splits: a storage that comes back removes only its own cost.
    """

    def __init__(self, problem: Problem) -> None:
        self.own = [problem.ops[storage.producer].cost for storage in problem.storages]
        self.price = np.array(self.own, dtype=float)
        """Per storage: its own cost and that of the neighborhoods next to it."""
        self.near = [
            sorted({*problem.ops[storage.producer].inputs,
                    *(out for reader in problem.consumers[index]
                      for out in problem.ops[reader].outputs)})
            for index, storage in enumerate(problem.storages)]
        self.node: dict[int, int] = {}  # of each storage that is evicted but needed later
        self.parent: list[int] = []
        self.cost: list[float] = []
        self.rim: list[set[int]] = []  # storages next to the neighborhood that may be alive

    def open(self, storage: int) -> None:
        """Add a storage that is evicted but needed later."""
        if storage in self.node:
            return
        root = len(self.parent)
        self.node[storage] = root
        self.parent.append(root)
        self.cost.append(self.own[storage])
        self.rim.append(set())
        for other in self.near[storage]:
            if other in self.node:
                root = self._join(root, self._root(self.node[other]))
            else:
                self.rim[root].add(other)
        self.rim[root].discard(storage)
        self._reprice_around(storage, root)

    def fill(self, storage: int) -> None:
        """Remove a storage that exists again."""
        node = self.node.pop(storage, None)
        if node is not None:
            root = self._root(node)
            self.cost[root] -= self.own[storage]
            self.rim[root].add(storage)
            self._reprice_around(storage, root)
        else:
            self._reprice(storage)

    def _reprice_around(self, storage: int, root: int) -> None:
        """Update the costs next to a neighborhood that has changed at `storage`.  Next to a large
        one the change matters little, so only those next to the storage are updated."""
        rim = self.rim[root]
        if len(rim) > _LARGE_RIM:
            for other in (storage, *self.near[storage]):
                self._reprice(other)
            return
        left = [other for other in rim if root not in self._reprice(other)]
        rim.difference_update(left)

    def _reprice(self, storage: int) -> set[int]:
        """Update the cost of a storage; return the neighborhoods next to it."""
        roots = {self._root(self.node[other]) for other in self.near[storage]
                 if other in self.node}
        self.price[storage] = self.own[storage] + sum(self.cost[root] for root in roots)
        return roots

    def _root(self, node: int) -> int:
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def _join(self, first: int, second: int) -> int:
        if first == second:
            return first
        if len(self.rim[first]) < len(self.rim[second]):
            first, second = second, first
        self.parent[second] = first
        self.cost[first] += self.cost[second]
        self.rim[first] |= self.rim[second]
        self.rim[second] = set()
        return first
