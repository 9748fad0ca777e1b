"""The smallest peak: a bound that no schedule beats, and a schedule that comes as near as it can.

The bound looks at one first run at a time and counts what must be alive there.  The schedule is
found by lazy walks (`solvers.lazy`) at ever smaller budgets, whatever the recomputations cost, and
by annealing (`solvers.local_search.descend`) from there, in turns.

There is one search for a problem and a seed.  It counts its work and reads neither clock nor
budget, so its result is the same for every budget and on every machine: a budget only ends it
earlier.  A budget that it does not meet is refused.

Blind spots: the bound knows of no need that spans two runs (recomputing an input while its sibling
is alive), so it may lie below the smallest peak that exists; on training graphs the two mostly
meet.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Iterator
from itertools import accumulate

from planner.solvers.incremental import drop_recomputes
from planner.solvers.lazy import EvictionHeuristic, counted_walk
from planner.solvers.local_search import descend, move_work
from planner.solvers.problem import Order, Problem
from planner.solvers.simulator import simulate

WORK, WORK_PER_OP, WORK_PER_OP_OF_SMALL = 2.0, 1e-3, 0.04
"""Work of the whole search (see `solvers.milp.MilpResult`); less for problems of a few ops."""
PATIENCE = 0.6
"""Fraction of that work after which the search ends without an improvement of `WORTH`."""
WORTH = 0.003
"""Improvement, as a fraction of the peak, that is worth a search."""
PATIENCE_OF_NEAR = 0.05
"""Like `PATIENCE`, once the bound leaves less than that to improve."""
MOST_OF_ONE_WALK = 0.2
"""Part of the work that one walk may take."""
WALKS_FIRST, ANNEALED_PER_WALKED = 0.2, 20.0
"""Part of the work for walks alone, unless the plain ones take less; and the work of annealing in
comparison to theirs after that."""
_MOST_RUNS_PER_OP = 3  # longer schedules than that are a bad start for annealing
_FRUITLESS_MOVES = 12_000  # before the next walks


def working_set_floor(problem: Problem) -> int:
    """A lower bound, in bytes, on the peak of every legal schedule.

    The maximum over first runs of the bytes that are certainly alive: inputs, outputs, workspace,
    storages kept to the end, and storages whose next reader cannot have them recomputed in between;
    less the input that the output may take over.
    """
    forced = _forced_bytes(problem)
    return max(forced[index] + op.workspace_bytes - _reused_bytes(problem, index)
               for index, op in enumerate(problem.ops))


def _forced_bytes(problem: Problem) -> list[int]:
    """Bytes of the storages that are alive at each first run under every legal schedule."""
    count = len(problem)
    delta = [0] * (count + 1)

    def alive(start: int, stop: int, size_bytes: int) -> None:
        if start < stop:
            delta[start] += size_bytes
            delta[stop] -= size_bytes

    for index, storage in enumerate(problem.storages):
        producer, size = storage.producer, storage.size_bytes
        if storage.kept_to_end:
            alive(producer, count, size)
            continue
        alive(producer, producer + 1, size)
        previous = producer
        for reader in problem.consumers[index]:
            recompute = _last_chance_to_replay(problem, producer, reader)
            alive(max(previous + 1, recompute), reader + 1, size)
            previous = reader
    return list(accumulate(delta[:-1]))


def _last_chance_to_replay(problem: Problem, op: int, reader: int) -> int:
    """Return the last first run, up to that of `reader`, just before which `op` may be recomputed;
    0 if there is none."""
    if not problem.ops[op].recomputable:
        return 0
    home = problem.segment_of[op]
    following = reader
    for segment in range(problem.segment_of[reader], home - 1, -1):
        if home in problem.segments[segment].replays:
            return following
        following = problem.segments[segment].start - 1
    return 0


def _reused_bytes(problem: Problem, index: int) -> int:
    """Upper bound on the bytes that the first run of an op saves by taking over an input's buffer.
    """
    return next((problem.storages[storage].size_bytes
                 for storage in problem.inplace_candidates(index)
                 if not _outlives(problem, storage, index)), 0)


def _outlives(problem: Problem, storage: int, index: int) -> bool:
    """Return whether the storage is alive after the first run of `index` under every legal
    schedule."""
    following = next((r for r in problem.consumers[storage] if r > index), None)
    if following is None:
        return False
    producer = problem.storages[storage].producer
    return _last_chance_to_replay(problem, producer, following) <= index


def minimum_peak(problem: Problem, *, seed: int = 0, target_bytes: int = 0, share: float = 1.0
                 ) -> Order:
    """Return the legal schedule with the smallest peak that the search finds, at any cost.

    Stops early once the peak is at most `target_bytes`, or after a `share` of the work.  A search
    that has come to its end without is not repeated: a plan for the smallest budget follows the
    refusal of a smaller one.
    """
    if share == 1.0:
        for known, its_seed, peak_bytes, best in _ended:
            if peak_bytes > target_bytes and its_seed == seed and known == problem:
                return best
    descent = Descent(problem, seed)
    descent.reaches(target_bytes, share=share)
    best = drop_recomputes(problem, target_bytes, descent.best)
    peak_bytes = simulate(problem, best).peak_bytes
    if share == 1.0 and peak_bytes > target_bytes:
        _ended.appendleft((problem, seed, peak_bytes, best))
    return best


class Descent:
    """The search for the smallest peak.  Mutable; each call continues it."""

    def __init__(self, problem: Problem, seed: int = 0, *, whole_work: float | None = None) -> None:
        """Create a search.  `whole_work`: the work after which it ends; `None`: the default."""
        self.problem = problem
        self.seed = seed
        self.floor = working_set_floor(problem)
        self.best = problem.keep_all_schedule
        """The schedule with the smallest peak found."""
        self.best_peak = simulate(problem, self.best).peak_bytes
        self._walked, self._walked_peak = self.best, self.best_peak
        self.work = 0.0
        self._whole_work = min(WORK + WORK_PER_OP * len(problem), WORK_PER_OP_OF_SMALL
                               * len(problem)) if whole_work is None else whole_work
        self._patience = PATIENCE if whole_work is None else 1.0
        self._max_walk_work = MOST_OF_ONE_WALK * min(self._whole_work, 1e3)
        self._steps = self._search()
        self._ended = False

    def reaches(self, target_bytes: int, deadline: float = math.inf, share: float = 1.0) -> bool:
        """Continue until the peak is at most `target_bytes`; return whether it is.

        `share`: fraction of the whole work after which to leave off.  `deadline` (of
        `time.monotonic`) is for callers that allow more than the usual work.
        """
        gained_at, level = 0.0, float(self.best_peak)
        while self.best_peak > max(target_bytes, self.floor) and not self._ended:
            spent = next(self._steps, None)
            self.work += spent or 0.0
            if self.best_peak < (1 - WORTH) * level:
                gained_at, level = self.work, float(self.best_peak)
            is_near = self.floor > (1 - WORTH) * self.best_peak
            patience = PATIENCE_OF_NEAR if is_near else self._patience
            self._ended = (spent is None or self.work >= share * self._whole_work
                           or self.work - gained_at > patience * self._whole_work
                           or time.monotonic() > deadline)
        return self.best_peak <= target_bytes

    def _search(self) -> Iterator[float]:
        """Yield the work of each step."""
        plain = [EvictionHeuristic()]
        if self.problem.sources:
            plain.append(EvictionHeuristic(keep_sources=True))
        for heuristic in plain:
            found = True
            while found:
                found, work = self._attempt((self.floor + self.best_peak) // 2, heuristic, 3)
                yield work
        walked = annealed = 0.0
        rounds = 0
        for rank, (heuristic, runs_per_op) in enumerate(_heuristics(self.seed, plain)):
            for work in self._bisect(heuristic, runs_per_op):
                walked += work
                yield work
            is_started = rank >= 2 * len(plain) + 2 or walked > WALKS_FIRST * self._whole_work
            if is_started and annealed < ANNEALED_PER_WALKED * walked:
                # Annealing that is stuck stays so: every other round begins where walks ended.
                begin = self._walked if rounds % 2 else self.best
                rounds += 1
                for work in self._anneal(self.seed + rank, begin):
                    annealed += work
                    yield work

    def _anneal(self, seed: int, begin: Order) -> Iterator[float]:
        """Lower the peak by local search, until it finds nothing more for a while."""
        is_short = len(begin) <= _MOST_RUNS_PER_OP * len(self.problem)
        start = begin if is_short else self.problem.keep_all_schedule
        fruitless = 0
        for found, moves in descend(self.problem, start, self.floor, seed):
            fruitless += moves
            if found is not start:
                start, fruitless = found, 0
                peak = simulate(self.problem, found).peak_bytes
                if peak < self.best_peak:
                    self.best, self.best_peak = found, peak
            yield move_work(self.problem) * moves
            if fruitless >= _FRUITLESS_MOVES:
                return

    def _bisect(self, heuristic: EvictionHeuristic, runs_per_op: int) -> Iterator[float]:
        """Bisect for the smallest budget at which a walk with this eviction heuristic succeeds."""
        low = self.floor
        step = max(1, self.floor >> 9)
        found, work = self._attempt(low, heuristic, runs_per_op)
        yield work
        if found:
            return
        found, work = self._attempt(self.best_peak - step, heuristic, runs_per_op)
        yield work
        while found and self.best_peak - low > step:
            middle = (low + self.best_peak) // 2
            is_lower, work = self._attempt(middle, heuristic, runs_per_op)
            yield work
            if not is_lower:
                low = middle

    def _attempt(
        self, budget: int, heuristic: EvictionHeuristic, runs_per_op: int
    ) -> tuple[bool, float]:
        """Walk once; return whether the peak is smaller, and the work."""
        found, work = counted_walk(
            self.problem, budget, heuristic, runs_per_op * len(self.problem) + 200,
            max_work=self._max_walk_work)
        if found is None:
            return False, work
        peak = simulate(self.problem, found).peak_bytes
        if peak < self._walked_peak:
            self._walked, self._walked_peak = found, peak
        if peak >= self.best_peak:
            return False, work
        self.best, self.best_peak = found, peak
        return True, work


_ended: deque[tuple[Problem, int, int, Order]] = deque(maxlen=2)
"""Problem, seed, smallest peak and its schedule of the last searches that came to their end."""


def _heuristics(
    seed: int, plain: list[EvictionHeuristic]
) -> Iterator[tuple[EvictionHeuristic, int]]:
    """Eviction heuristics with the runs per op to allow: plain scores first, then random ones and
    more expensive ones."""
    for heuristic in plain:
        yield heuristic, 3
        yield heuristic, 20
    yield EvictionHeuristic(cost=0.0), 10
    yield EvictionHeuristic(distance=0.0), 10
    yield EvictionHeuristic(cost=0.0, size=0.0), 10
    chance = random.Random(seed)
    for effort in (10, 10, 40):
        for rank in range(20):
            cost, size, distance = (chance.uniform(0.0, 1.5) for _ in range(3))
            yield EvictionHeuristic(cost, size, distance,
                                    keep_sources=plain[rank % len(plain)].keep_sources), effort
