"""Repetition: stretches of ops that recur at a fixed distance, such as the layers of a network.

Two ops are *alike at a distance* if they have the same cost, sizes and memory, and if each input of
the one is that input of the other, or is made so many ops later.  A *run* is a stretch in which
every op is like the one a period later.  Finding runs compares a few likely periods op by op,
without graph isomorphism: O(ops * reads * periods).

Blind spot: the ops must come in the same order each time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from planner.solvers.problem import Problem

_MOST_PERIODS = 24
"""Number of distances tried, the most frequent ones between ops of the same cost and sizes."""
_NEXT_OCCURRENCES = 6
LEAST_SPARED = 8
"""Smallest number of ops that a run must spare."""


class Run(NamedTuple):
    """Ops from `start` to before `stop`; each is like the one a period after it."""

    start: int
    stop: int
    period: int

    @property
    def spared(self) -> int:
        """Number of ops after the first stretch."""
        return self.stop - self.start - self.period


def runs_of(problem: Problem) -> tuple[Run, ...]:
    """Return disjoint runs, those that spare most ops first; each contains its stretch at least
    twice."""
    ops, storages = problem.ops, problem.storages

    def same_source(first: int, second: int, period: int) -> bool:
        if first == second:
            return True
        maker, other = storages[first].producer, storages[second].producer
        return (other - maker == period
                and ops[maker].outputs.index(first) == ops[other].outputs.index(second))

    def same_sources(index: int, period: int) -> bool:
        return all(same_source(*pair, period)
                   for pair in zip(ops[index].inputs, ops[index + period].inputs, strict=True))

    # Layers may be segments of their own; such segments are told apart by what they replay.
    replayed = [tuple(home - number for home in segment.replays)
                for number, segment in enumerate(problem.segments)]
    described = [(*_description(problem, index), replayed[problem.segment_of[index]])
                 for index in range(len(problem))]
    return tuple(find_runs(described, same_sources, 2, LEAST_SPARED))


def find_runs(described: Sequence[Hashable], same_sources: Callable[[int, int], bool],
              times: int, least_spared: int = 1) -> Iterator[Run]:
    """Yield disjoint runs in any sequence, those that spare most items first.

    `described`: all of each item except the origin of its inputs.  `same_sources(index, period)`:
    whether two items with the same description have corresponding inputs.  Each run contains its
    stretch at least so many `times`.
    """
    free = [True] * len(described)
    alike = {period: [described[index] == described[index + period]
                      and same_sources(index, period)
                      for index in range(len(described) - period)]
             for period in _likely_periods(described)}
    while True:
        found = [run for period, marks in alike.items()
                 for run in _stretches(marks, free, period, times)]
        best = max(found, default=None, key=lambda run: (run.spared, -run.period))
        if best is None or best.spared < least_spared:
            return
        yield best
        free[best.start:best.stop] = [False] * (best.stop - best.start)


def _description(problem: Problem, index: int) -> tuple[object, ...]:
    """All of an op except its segment and the origin of its inputs."""
    op, storages = problem.ops[index], problem.storages
    return (op.cost, op.workspace_bytes, op.recomputable, op.replay_state_bytes, len(op.inputs),
            tuple(op.inputs.index(s) for s in op.inplace),
            tuple((storages[s].size_bytes, storages[s].kept_to_end) for s in op.outputs))


def _likely_periods(described: Sequence[Hashable]) -> list[int]:
    places: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, description in enumerate(described):
        places[description].append(index)
    distances: Counter[int] = Counter()
    for indices in places.values():
        for rank, here in enumerate(indices):
            distances.update(there - here
                             for there in indices[rank + 1:rank + 1 + _NEXT_OCCURRENCES])
    ranked = sorted(distances, key=lambda d: (-distances[d], d))
    return ranked[:_MOST_PERIODS]


def _stretches(alike: Sequence[bool], free: Sequence[bool], period: int, times: int
               ) -> Iterator[Run]:
    """Yield the longest runs of a period among free items that contain the stretch so many times.
    """
    start = None
    for index in range(len(alike) + 1):
        goes_on = (index < len(alike) and alike[index] and free[index] and free[index + period])
        if goes_on and start is None:
            start = index
        elif not goes_on and start is not None:
            if index - start >= (times - 1) * period:
                yield Run(start, index + period, period)
            start = None
