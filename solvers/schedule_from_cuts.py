"""A whole schedule from the storages retained at a few moments: recompute just in time.

A *cut* is the first run of an op; storages alive past it are *retained* at the cut.  A missing
input of a later op is recomputed right before that op runs, together with its own missing inputs.
Where such a schedule exceeds its budget, `next_cuts` places the cuts of the next model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from planner.solvers.problem import Order, Problem
from planner.solvers.simulator import unroll


def schedule_from_cuts(problem: Problem, cuts: Sequence[int], retained: Sequence[Collection[int]],
                       *, early: bool = False) -> Order:
    """Return the schedule that retains `retained[i]` past the first run of op `cuts[i]`
    (ascending).

    With `early`, a missing storage to be retained past a cut is recomputed right before it, as in
    the time-cut model, instead of when it is read.  Storages that are needed later and that no
    recomputation may bring back are retained as well.  The schedule is always legal; its peak is
    not limited.
    """
    chosen = [set(storages) for storages in retained]
    while True:
        schedule, missing = _walk(problem, cuts, chosen, early)
        if not missing:
            return schedule
        for index, storage in missing:
            producer = problem.storages[storage].producer
            for earlier in range(index + 1):
                if cuts[earlier] >= producer:
                    chosen[earlier].add(storage)


def _walk(problem: Problem, cuts: Sequence[int], chosen: Sequence[set[int]],
          early: bool) -> tuple[Order, list[tuple[int, int]]]:
    """Make one pass over the first runs.  Also return the (cut, storage) pairs that must be
    retained because a recomputation is not allowed where it would be needed."""
    ops, storages = problem.ops, problem.storages
    at_hand = [False] * len(storages)
    missing: list[tuple[int, int]] = []
    schedule: list[int] = []
    upcoming = 0  # index of the next cut

    def run(index: int) -> None:
        schedule.append(index)
        for output in ops[index].outputs:
            at_hand[output] = True

    for first in range(len(ops)):
        stack = [first]
        if early and upcoming and upcoming < len(cuts) and cuts[upcoming] == first:
            gone = {storages[s].producer for s in chosen[upcoming]
                    if storages[s].producer < first and not at_hand[s]}
            stack += sorted((v for v in gone if problem.may_replay(v, first)), reverse=True)
        while stack:
            index = stack[-1]
            lacking = []
            for storage in ops[index].inputs:
                if not at_hand[storage]:
                    producer = storages[storage].producer
                    if problem.may_replay(producer, first):
                        lacking.append(producer)
                    else:
                        missing.append((upcoming - 1, storage))
                        at_hand[storage] = True
            if lacking:
                stack.extend(dict.fromkeys(reversed(lacking)))
                continue
            stack.pop()
            if index == first or not all(at_hand[output] for output in ops[index].outputs):
                run(index)
        if upcoming < len(cuts) and cuts[upcoming] == first:
            stays = chosen[upcoming]
            upcoming += 1
            for storage in range(len(storages)):
                if at_hand[storage] and storage not in stays and not storages[storage].kept_to_end:
                    at_hand[storage] = False
    return tuple(schedule), missing


def next_cuts(problem: Problem, budget_bytes: int, schedule: Order, cuts: tuple[int, ...], *,
              first: int = 0) -> tuple[int, ...] | None:
    """Return the cuts of the next model: also at the first run, at op `first` or after, where
    `schedule` exceeds the budget most and there was no cut yet; `None` if there is no such run."""
    timeline = unroll(problem, schedule)
    memory = (-1, *timeline.memory_bytes, -1)
    found = []  # local peaks
    for op, position in timeline.first_runs.items():
        before, here, after = memory[position:position + 3]
        if op >= first and op not in cuts and here > budget_bytes and before <= here > after:
            found.append((-here, op))
    return tuple(sorted({*cuts, min(found)[1]})) if found else None
