"""Repetition: stretches of ops that recur at a fixed distance, such as the layers of a network.

Two ops are *alike at a distance* where they cost, make and hold the same and where each input of
the one is that input of the other, or is made so many ops later.  A *run* is a stretch in which
every op is like the one a period further on.  Finding runs compares a few likely periods op by op,
so it takes no graph isomorphism: O(ops * reads * periods).

Blind spot: the ops must come in the same order each time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from solvers.problem import Problem

MOST_PERIODS = 24
"""So many of the most frequent distances between ops of the same cost and sizes are tried."""
_NEXT_OCCURRENCES = 6
LEAST_SPARED = 8
"""A run has to spare at least so many ops."""


@dataclass(frozen=True, slots=True)
class Run:
    """Ops from `start` to before `stop`; each is like the one a period after it."""

    start: int
    stop: int
    period: int

    @property
    def times(self) -> int:
        """How often the stretch occurs, the last time perhaps not whole."""
        return -(-(self.stop - self.start) // self.period)


def runs_of(problem: Problem) -> tuple[Run, ...]:
    """Disjoint runs, those that spare most ops first; each holds its stretch at least twice."""
    described = [_description(problem, index) for index in range(len(problem))]
    periods = _likely_periods(described)
    free = [True] * len(problem)
    found: list[Run] = []
    candidates = {period: _alike(problem, described, period) for period in periods}
    while True:
        best = None
        for period, alike in candidates.items():
            for run in _stretches(alike, free, period):
                spared = run.stop - run.start - period
                if best is None or (spared, -period) > (best.stop - best.start - best.period,
                                                        -best.period):
                    best = run
        if best is None or best.stop - best.start - best.period < LEAST_SPARED:
            return tuple(found)
        found.append(best)
        free[best.start:best.stop] = [False] * (best.stop - best.start)


def _description(problem: Problem, index: int) -> tuple[object, ...]:
    """All of an op but where its inputs come from."""
    op, storages = problem.ops[index], problem.storages
    return (op.cost, op.workspace_bytes, op.recomputable, op.replay_state_bytes, len(op.inputs),
            tuple(op.inputs.index(s) for s in op.inplace), problem.segment_of[index],
            tuple((storages[s].size_bytes, storages[s].kept_to_end) for s in op.outputs))


def _likely_periods(described: list[tuple[object, ...]]) -> list[int]:
    places: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, description in enumerate(described):
        places[description].append(index)
    distances: Counter[int] = Counter()
    for indices in places.values():
        for rank, here in enumerate(indices):
            distances.update(there - here
                             for there in indices[rank + 1:rank + 1 + _NEXT_OCCURRENCES])
    ranked = sorted(distances, key=lambda d: (-distances[d], d))
    return ranked[:MOST_PERIODS]


def _alike(problem: Problem, described: list[tuple[object, ...]], period: int) -> list[bool]:
    """For each op whether it is like the one a period after it."""
    ops, storages = problem.ops, problem.storages

    def same_source(first: int, second: int) -> bool:
        if first == second:
            return True
        maker, other = storages[first].producer, storages[second].producer
        return (other - maker == period
                and ops[maker].outputs.index(first) == ops[other].outputs.index(second))

    return [described[index] == described[index + period]
            and all(map(same_source, ops[index].inputs, ops[index + period].inputs))
            for index in range(len(ops) - period)]


def _stretches(alike: list[bool], free: list[bool], period: int) -> list[Run]:
    """The longest runs of a period among free ops that hold the stretch at least twice."""
    runs = []
    start = None
    for index in range(len(alike) + 1):
        goes_on = (index < len(alike) and alike[index] and free[index] and free[index + period])
        if goes_on and start is None:
            start = index
        elif not goes_on and start is not None:
            if index - start >= period:
                runs.append(Run(start, index + period, period))
            start = None
    return runs
