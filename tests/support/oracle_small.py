"""Exact results for tiny problems, by shortest paths over sets of live storages; uses no product
code except the types of `solvers.problem`.

A state is the next first run and the live storages (each with the segment in which it was made).
Replay state is not modelled: problems with it are not supported.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain, combinations

from planner.solvers.problem import Problem

_State = tuple[int, frozenset[tuple[int, int]]]


def cheapest(problem: Problem, budget_bytes: int) -> float | None:
    """Return the least cost of any legal schedule within the budget; `None` if there is none."""
    assert not any(op.replay_state_bytes for op in problem.ops)
    start: _State = (0, frozenset())
    best: dict[_State, float] = {start: 0.0}
    heap: list[tuple[float, int, _State]] = [(0.0, 0, start)]
    ticket = 0
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state[0] == len(problem):
            return cost
        if cost > best[state]:
            continue
        for op, after in _steps(problem, state, budget_bytes):
            fresh = cost + problem.ops[op].cost
            if fresh < best.get(after, float("inf")):
                best[after] = fresh
                ticket += 1
                heapq.heappush(heap, (fresh, ticket, after))
    return None


def smallest_peak(problem: Problem) -> int:
    """Return the least peak of any legal schedule."""
    low, high = -1, sum(s.size_bytes for s in problem.storages) * 2 + sum(
        op.workspace_bytes for op in problem.ops)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if cheapest(problem, middle) is not None else (middle, high)
    return high


def _steps(problem: Problem, state: _State, budget: int) -> Iterator[tuple[int, _State]]:
    """Yield every run that may come next, with every choice of storages to keep after it."""
    following, held = state
    here = problem.segment_of[following]
    names = {storage for storage, _ in held}
    size = [s.size_bytes for s in problem.storages]
    kept = {s for s in range(len(size)) if problem.storages[s].kept_to_end}
    for op in range(following + 1):
        if op < following and not problem.may_replay(op, following):
            continue
        described = problem.ops[op]
        if not names.issuperset(described.inputs):
            continue
        again = op < following
        made = [s for s in described.outputs if not (again and s in kept)]
        base = {pair for pair in held if pair[0] not in made}
        total = sum(size[s] for s, _ in base) + sum(size[s] for s in described.outputs)
        total += described.workspace_bytes
        droppable = [pair for pair in sorted(base) if pair[0] not in kept]
        fresh = [(s, here) for s in made]
        optional = droppable + [pair for pair in fresh if pair[0] not in kept]
        forced = [pair for pair in chain(sorted(base), fresh) if pair[0] in kept]
        for after in _subsets(optional):
            remaining = {s for s, _ in after}
            taken = next((size[s] for s in described.inplace
                          if s not in remaining and s not in kept and (s, here) in held), 0)
            if total - taken <= budget:
                yield op, (following + (not again), frozenset([*after, *forced]))


def _subsets(items: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    return chain.from_iterable(combinations(items, k) for k in range(len(items) + 1))
