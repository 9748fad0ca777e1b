"""The smallest peak: a bound that no schedule beats, and a schedule that comes as near as it can.

The bound looks at one first run at a time and counts what must be alive there.  The schedule is
found by walking lazily (`solvers.lazy`) at ever smaller budgets, whatever the recomputations cost,
and by annealing (`solvers.local_search.repair`) from there, which wins on graphs that are no
training steps.

Blind spots: the bound knows of no need that spans two runs (recomputing an input while its sibling
is held), so it may lie below the smallest peak that exists; on training graphs the two mostly meet.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from itertools import accumulate

from solvers.lazy import EvictionTaste, lazy_schedule
from solvers.local_search import repair
from solvers.problem import Order, Problem
from solvers.simulator import simulate
from solvers.working_set import inplace_candidates

_MOST_RUNS_PER_OP = 3  # longer schedules than that are a bad start for annealing
_ANNEAL_MOVES = 30_000  # per target
_ANNEAL_MOVES_IN_ALL = 240_000
_MOVE_SECONDS, _RUN_SECONDS = 5e-5, 3e-5  # what a move and a run of a walk take, about
_ANNEAL_SECONDS = 60.0  # only so that `moves` is what stops it


def working_set_floor(problem: Problem) -> int:
    """A lower bound, in bytes, on the peak of every legal schedule.

    The most that is certainly alive at some first run: inputs, outputs, workspace, storages kept to
    the end, and storages whose next reader cannot have them recomputed in between; less the input
    that the output may take over.
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
            remake = _last_chance_to_replay(problem, producer, reader)
            alive(max(previous + 1, remake), reader + 1, size)
            previous = reader
    return list(accumulate(delta[:-1]))


def _last_chance_to_replay(problem: Problem, op: int, reader: int) -> int:
    """The last first run, up to that of `reader`, just before which `op` may be recomputed; 0 where
    there is none."""
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
    """What the first run of an op may save by taking over an input's buffer, at most."""
    return next((problem.storages[storage].size_bytes
                 for storage in inplace_candidates(problem, index)
                 if not _outlives(problem, storage, index)), 0)


def _outlives(problem: Problem, storage: int, index: int) -> bool:
    """Whether the storage is alive after the first run of `index` under every legal schedule."""
    following = next((r for r in problem.consumers[storage] if r > index), None)
    if following is None:
        return False
    producer = problem.storages[storage].producer
    return _last_chance_to_replay(problem, producer, following) <= index


def minimum_peak(problem: Problem, *, time_limit: float = 10.0, seed: int = 0,
                 target_bytes: int = 0) -> Order:
    """A legal schedule whose peak is as small as can be found within `time_limit` seconds.

    Its cost plays no part.  Stops early where the peak meets `working_set_floor` or is at most
    `target_bytes`.  The same seed gives the same schedule unless the time limit cuts the search
    short, and a target only ends the same search earlier.
    """
    descent = Descent(problem, seed, target_bytes)
    descent.run(time.monotonic() + time_limit)
    return descent.best


class Descent:
    """Walks at ever smaller budgets, with ever more runs per op allowed and in other tastes.

    Mutable; a search that a deadline has stopped goes on where it was.
    """

    def __init__(self, problem: Problem, seed: int = 0, target_bytes: int = 0) -> None:
        self.problem = problem
        self.seed = seed
        self.floor = working_set_floor(problem)
        self.goal = max(self.floor, target_bytes)
        self.best = problem.keep_all_schedule
        """The schedule with the smallest peak found."""
        self.best_peak = simulate(problem, self.best).peak_bytes
        self._deadline = 0.0
        self._steps = self._search()

    def run(self, deadline: float, work: float = math.inf) -> bool:
        """Go on until the goal is met, nothing is left to try, `deadline`, or so much work (seconds
        of some machine) is done; whether the deadline was what ended it."""
        self._deadline = deadline
        if self.best_peak > self.goal:
            for spent in self._steps:
                work -= spent
                if self.best_peak <= self.goal:
                    break
                if time.monotonic() > deadline:
                    return True
                if work <= 0:
                    break
        return False

    def _search(self) -> Iterator[float]:
        """Yields the work of each step, a second or two at most."""
        helped = False
        while self._attempt((self.floor + self.best_peak) // 2, EvictionTaste(),
                            3 * len(self.problem) + 200):
            helped = True
            yield self._walk_work(3)
        if not helped:
            yield from self._anneal()
        for rank, (taste, runs_per_op) in enumerate(_tastes(self.seed)):
            yield from self._bisect(taste, runs_per_op)
            if rank % 12 == 2 and not (helped and rank == 2):
                yield from self._anneal()

    def _walk_work(self, runs_per_op: int) -> float:
        return _RUN_SECONDS * min(runs_per_op, 4) * len(self.problem)

    def _anneal(self) -> Iterator[float]:
        """Lower the peak by local search, in smaller steps where larger ones fail."""
        is_short = len(self.best) <= _MOST_RUNS_PER_OP * len(self.problem)
        current = self.best if is_short else self.problem.keep_all_schedule
        peak = simulate(self.problem, current).peak_bytes
        share, draw, moves, left = 0.1, self.seed, _ANNEAL_MOVES, _ANNEAL_MOVES_IN_ALL
        while peak > self.goal and share > 0.002 and left > 0:
            draw += 1
            target = peak - max(1, int(share * (peak - self.floor)))
            found = repair(self.problem, target, current, time_limit=_ANNEAL_SECONDS,
                           deadline=self._deadline, moves=moves, seed=draw)
            spent = moves
            left -= spent
            if found is None:
                share, moves = share / 2, moves * 2
            else:
                share *= 1.5
                current, peak = found, simulate(self.problem, found).peak_bytes
                if peak < self.best_peak:
                    self.best, self.best_peak = current, peak
            yield _MOVE_SECONDS * spent

    def _bisect(self, taste: EvictionTaste, runs_per_op: int) -> Iterator[float]:
        """Bisect for the smallest budget at which a walk in this taste succeeds."""
        low = self.floor
        step = max(1, self.floor >> 9)
        max_runs, work = runs_per_op * len(self.problem) + 200, self._walk_work(runs_per_op)
        if self._attempt(low, taste, max_runs) or not self._attempt(
                self.best_peak - step, taste, max_runs):
            yield 2 * work
            return
        while self.best_peak - low > step:
            yield work
            middle = (low + self.best_peak) // 2
            if not self._attempt(middle, taste, max_runs):
                low = middle

    def _attempt(self, budget: int, taste: EvictionTaste, max_runs: int) -> bool:
        found = lazy_schedule(self.problem, budget, taste=taste, max_runs=max_runs,
                              deadline=self._deadline)
        if found is None:
            return False
        peak = simulate(self.problem, found).peak_bytes
        if peak >= self.best_peak:
            return False
        self.best, self.best_peak = found, peak
        return True


def _tastes(seed: int) -> Iterator[tuple[EvictionTaste, int]]:
    """Tastes with the runs per op to allow: plain scores first, then random ones, dearer ones."""
    yield EvictionTaste(), 3
    yield EvictionTaste(), 20
    yield EvictionTaste(cost=0.0), 10
    yield EvictionTaste(distance=0.0), 10
    yield EvictionTaste(cost=0.0, size=0.0), 10
    chance = random.Random(seed)
    for effort in (10, 10, 40):
        for _ in range(20):
            cost, size, distance = (chance.uniform(0.0, 1.5) for _ in range(3))
            chance.random()  # so that a seed goes on giving the schedules that it gave
            yield EvictionTaste(cost, size, distance), effort
