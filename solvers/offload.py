"""Keep, recompute or store on the host: the joint choice within a budget.

The search begins with the result of any algorithm that only recomputes.  Recomputations are then
given up, op by op, and `solvers.placement` stores on the host what no longer fits, as long as
waiting for copies costs less.  So a schedule is never worse than that of recomputation alone.  Two
more orders are tried: the one that recomputes nothing, and the best one of the relaxation below.
The search is counted in moves, not timed.

The bound.  A transfer frees the memory of the storage that it moves, and nothing else.  Consider
the problem in which offloadable storages use memory only while an op reads or makes them: there,
every schedule with its transfers removed is a legal schedule that uses no more memory and costs no
more.  So a bound for that problem holds here.  The idea of one problem for both choices is that of
POFO (Beaumont et al., "Efficient combination of rematerialization and offloading for training
DNNs", NeurIPS 2021) and POET (Patil et al., ICML 2022), who solve it exactly, for chains and as a
MILP.

Blind spots: the bound ignores the time of copies; an op is given up with all of its recomputations
or with none of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import replace

from planner.solvers.actions import Action, Order, as_order
from planner.solvers.minimum import minimum_peak
from planner.solvers.placement import with_transfers
from planner.solvers.problem import Op, Problem
from planner.solvers.simulator import simulate
from planner.solvers.task import Algorithm, Proposal, Task

_MOVES, _MOVED_RUNS = 400, 200_000
"""Moves of a search, and the total number of runs in all of its moves: the longer an order, the
fewer moves."""
_STEPS = 8
"""Recomputations are given up in this many parts before single ones are tried."""
_MARGINS = (0.0, 0.05, 0.1, 0.2)
"""Fractions of the budget that are stored in addition to the necessary bytes."""

_Found = tuple[Action | int, ...]


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
        if _rank(problem, task.budget_bytes, alone.schedule) <= (0, problem.keep_all_cost):
            return alone
        free = propose(replace(
            task, problem=relaxed(problem), deadline=time.monotonic() + seconds / 2,
            warm_start=None, ideas=()))
        orders = (as_order(alone.schedule), as_order(free.schedule), problem.keep_all_schedule)
        found = search(problem, task.budget_bytes, orders)
        if _rank(problem, task.budget_bytes, found)[0]:
            # A schedule independent of the budget, so that a refusal's promise can be kept.
            least = minimum_peak(relaxed(problem), seed=task.seed)
            found = search(problem, task.budget_bytes, (*orders, least))
        task.report("stored on the host: "
                    f"{simulate(problem, found).cost / (problem.keep_all_cost or 1.0) - 1:.3%}")
        return Proposal(found, free.lower_bound, late=alone.late or free.late,
                        interrupted=alone.interrupted or free.interrupted)

    return propose_jointly


def search(problem: Problem, budget_bytes: int, orders: Iterable[Order]) -> _Found:
    """Return the cheapest schedule found within the budget, else the one that comes nearest, among
    `orders` with some recomputations removed and storages on the host instead."""
    best: tuple[tuple[int, float], _Found] | None = None
    for order in dict.fromkeys(orders):
        found = _search_from(problem, budget_bytes, order)
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None, "there is at least one order"
    return best[1]


def _search_from(problem: Problem, budget_bytes: int, order: Order
                 ) -> tuple[tuple[int, float], _Found]:
    moves = min(_MOVES, _MOVED_RUNS // len(order) + _STEPS)

    def evaluated(dropped: Set[int], margin: float = 0.0) -> tuple[tuple[int, float], _Found]:
        found = with_transfers(problem, _without(problem, order, dropped), budget_bytes,
                               int(margin * budget_bytes))
        return _rank(problem, budget_bytes, found), found

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


def _rank(problem: Problem, budget_bytes: int, schedule: Iterable[Action | int]
          ) -> tuple[int, float]:
    """Sort key, smaller is better: the excess over the budget, then the cost."""
    peak, cost = simulate(problem, tuple(schedule))
    return max(0, peak - budget_bytes), cost
