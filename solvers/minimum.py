"""The smallest peak: a bound that no schedule beats, and a schedule that comes as near as it can.

The bound looks at one first run at a time and counts what must be alive there.  The schedule is
found by walking lazily (`solvers.lazy`) at ever smaller budgets, whatever the recomputations cost.

Blind spots: the bound knows of no need that spans two runs (recomputing an input while its sibling
is held), so it may lie below the smallest peak that exists; on training graphs the two mostly meet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import accumulate

from solvers.lazy import EvictionTaste, lazy_schedule
from solvers.problem import Problem, Schedule
from solvers.simulator import simulate


def working_set_floor(problem: Problem) -> int:
    """A lower bound, in bytes, on the peak of every legal schedule.

    The most that is certainly alive at some first run: inputs, outputs, workspace, storages kept to
    the end, and storages whose next reader cannot have them recomputed in between; less the input
    that the output may take over.
    """
    forced = _forced_bytes(problem)
    return max(forced[index] + op.workspace_bytes - _takeover_bytes(problem, index)
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


def _takeover_bytes(problem: Problem, index: int) -> int:
    """What the first run of an op may save by taking over an input's buffer, at most."""
    op = problem.ops[index]
    home = problem.segment_of[index]
    for storage in op.inplace:
        described = problem.storages[storage]
        same_segment = (problem.segment_of[described.producer] == home
                        or problem.may_replay(described.producer, index))
        if same_segment and not described.kept_to_end and not _outlives(problem, storage, index):
            return described.size_bytes
    return 0


def _outlives(problem: Problem, storage: int, index: int) -> bool:
    """Whether the storage is alive after the first run of `index` under every legal schedule."""
    following = next((r for r in problem.consumers[storage] if r > index), None)
    if following is None:
        return False
    producer = problem.storages[storage].producer
    return _last_chance_to_replay(problem, producer, following) <= index


def minimum_peak(problem: Problem, *, time_limit: float = 10.0, seed: int = 0) -> Schedule:
    """A legal schedule whose peak is as small as can be found within `time_limit` seconds.

    Its cost plays no part.  Stops early where the peak meets `working_set_floor`.  The same seed
    gives the same schedule unless the time limit cuts the search short.
    """
    deadline = time.monotonic() + time_limit
    floor = working_set_floor(problem)
    best = problem.plain_schedule
    best_peak = simulate(problem, best).peak_bytes

    def attempt(budget_bytes: int, taste: EvictionTaste, draw: int) -> None:
        nonlocal best, best_peak
        found = lazy_schedule(problem, budget_bytes, taste=taste, seed=draw)
        if found is not None:
            peak = simulate(problem, found).peak_bytes
            if peak < best_peak:
                best, best_peak = found, peak

    for taste in _tastes(seed):
        if best_peak <= floor or time.monotonic() > deadline:
            return best
        attempt(floor, taste, seed)
        low = floor
        # Invariant of the bisection: nothing was found at `low`, `best_peak` was found.
        while best_peak - low > max(1, floor >> 10) and time.monotonic() < deadline:
            middle = (low + best_peak) // 2
            before = best_peak
            attempt(middle, taste, seed)
            if best_peak > middle or best_peak == before:
                low = middle
    return best


def _tastes(seed: int) -> Iterator[EvictionTaste]:
    """Plain scores first, then a limited number of random ones."""
    yield EvictionTaste()
    yield EvictionTaste(cost=0.0, size=1.0, distance=1.0)
    yield EvictionTaste(cost=1.0, size=1.0, distance=0.0)
    yield EvictionTaste(cost=0.0, size=0.0, distance=1.0)
    chance = random.Random(seed)
    for _ in range(40):
        yield EvictionTaste(chance.uniform(0.0, 1.5), chance.uniform(0.0, 1.5),
                            chance.uniform(0.0, 1.5), chance.uniform(0.0, 0.5))
