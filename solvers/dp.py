"""Dynamic programming over the chain of narrow frontiers.

M. Kusumoto et al., "A Graph Theoretic Framework of Recomputation Algorithms for Memory-Efficient
Backpropagation", NeurIPS 2019 (arXiv:1905.11722): a sequence of lower sets of the graph, whose
boundaries are retained.  Here the lower sets are those that end at a narrow frontier; a segment
between two of them is either retained whole or recomputed from its frontier, as in the
heterogeneous chains of J. Herrmann et al. (arXiv:1911.13214).

The state is the bytes retained so far, in steps of 1/`STEPS` of the budget.  The memory of a
segment's recomputation is estimated from above, as all the bytes that it makes.  The program is
therefore run for several nominal budgets and the simulator picks the result; dispensable
recomputations are dropped afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from planner.solvers.frontiers import Frontier, Region, narrow_frontiers, region_after
from planner.solvers.incremental import drop_recomputes
from planner.solvers.problem import Problem
from planner.solvers.schedule_from_cuts import schedule_from_cuts
from planner.solvers.simulator import simulate, unroll
from planner.solvers.task import Proposal, Task

STEPS = 500
"""Resolution of the retained bytes."""
MOST_FRONTIERS = 128
ROUNDS = 13
"""Nominal budgets tried by bisection."""


def dp(task: Task) -> Proposal:
    """Return the best segmentation for the largest nominal budget that fits."""
    problem, budget = task.problem, task.budget_bytes
    best = problem.keep_all_schedule
    best_peak, best_cost = simulate(problem, best)
    if best_peak <= budget:
        return Proposal(best)
    chain = chain_of(problem)
    # Nominal budgets do not depend on the budget: a budget that is missed narrowly leads to the
    # same schedules as the smallest budget that is then reported.
    low, high = 0, 2 * best_peak
    for _ in range(ROUNDS):
        nominal = (low + high) // 2
        retained = chain.segmentation(nominal)
        if retained is None:
            low = nominal
            continue
        schedule = schedule_from_cuts(problem, (chain.region.pivot,), (retained,))
        peak, cost = simulate(problem, schedule)
        if peak <= budget:
            schedule = drop_recomputes(problem, budget, schedule)
            peak, cost = simulate(problem, schedule)
            low = nominal
        else:
            high = nominal
        if (peak <= budget and (best_peak > budget or cost < best_cost)) or (
                peak < best_peak and best_peak > budget):
            best, best_peak, best_cost = schedule, peak, cost
        if task.seconds_left <= 0:
            break
    return Proposal(best)


@dataclass(frozen=True, slots=True)
class Chain:
    """Segments between candidate frontiers of the region that may be recomputed after a pivot."""

    frontiers: tuple[Frontier, ...]
    region: Region
    retained: np.ndarray
    """retained[a, b]: bytes retained if the segment from boundary a to b is retained whole."""
    again: np.ndarray
    """again[a, b]: bytes made if the segment is recomputed."""
    cost: np.ndarray
    """cost[a, b]: cost of recomputing the segment."""
    around: np.ndarray
    """around[a, b]: peak of the other values while its results are read after the pivot."""
    needed_within: tuple[frozenset[int], ...]
    """Between each boundary and the next: the storages that are read after the pivot."""
    fixed_bytes: int
    """Bytes at the pivot that no choice changes."""

    def segmentation(self, nominal_bytes: int) -> frozenset[int] | None:
        """Return the storages to retain at the pivot for the cheapest segmentation within a nominal
        budget; `None` if there is none."""
        segments = self._segments(nominal_bytes)
        if segments is None:
            return None
        whole = (self.needed_within[piece] for start, end, retained in segments if retained
                 for piece in range(start, end))
        borders = (self.frontiers[start - 1].storages for start, _, _ in segments if start > 0)
        return frozenset[int]().union(self.region.forced, *borders, *whole)

    def _segments(self, nominal_bytes: int) -> list[tuple[int, int, bool]] | None:
        """Return (start, end, retained whole) of each segment, last first."""
        count = len(self.frontiers) + 1
        step = max(1.0, nominal_bytes / STEPS)
        narrow = [0.0, *(float(f.size_bytes) for f in self.frontiers)]
        best = np.full((count + 1, STEPS + 1), np.inf)
        best[0, 0] = 0.0
        origin = np.full((count + 1, STEPS + 1, 3), -1, dtype=np.int32)
        headroom = nominal_bytes - self.fixed_bytes
        for end in range(1, count + 1):
            for start in range(end):
                into = narrow[end] if end < count else 0.0
                for whole in (True, False):
                    if whole and start != end - 1:
                        continue  # a longer stretch is retained whole segment by segment
                    held = self.retained[start, end] if whole else self.again[start, end]
                    stays = (self.retained[start, end] if whole else 0.0) + into
                    limit = min(headroom - stays,
                                nominal_bytes - self.around[start, end] - held)
                    if limit < 0:
                        continue
                    shift = int(np.ceil(stays / step))
                    last = min(STEPS - shift, int(limit / step))
                    if last < 0:
                        continue
                    price = 0.0 if whole else self.cost[start, end]
                    offer = best[start, :last + 1] + price
                    target = best[end, shift:shift + last + 1]
                    better = offer < target
                    if better.any():
                        target[better] = offer[better]
                        where = np.nonzero(better)[0]
                        origin[end, where + shift, 0] = start
                        origin[end, where + shift, 1] = where
                        origin[end, where + shift, 2] = whole
        if not np.isfinite(best[count]).any():
            return None
        segments = []
        end, at = count, int(np.argmin(best[count]))
        while end > 0:
            start, before, retained = (int(x) for x in origin[end, at])
            segments.append((start, end, bool(retained)))
            end, at = start, before
        return segments


def chain_of(problem: Problem) -> Chain:
    """Return the chain of a problem, with the pivot at the peak of the keep-all order.

    O(frontiers * (ops + reads)).
    """
    timeline = unroll(problem, problem.keep_all_schedule)
    region = region_after(problem, timeline.peak_position)
    chosen = narrow_frontiers(problem, region, MOST_FRONTIERS)
    ops, storages = problem.ops, problem.storages
    bounds = [0, *(f.position for f in chosen), region.pivot + 1]
    count = len(bounds) - 1
    free = [s for s in region.needed if s not in region.forced]
    reads = {s: [r for r in problem.consumers[s] if r > region.pivot] for s in free}
    piece_of = {index: bisect_right(bounds, index) - 1 for index in region.ops}
    piece_ops: list[list[int]] = [[] for _ in range(count)]
    for index, piece in piece_of.items():
        piece_ops[piece].append(index)
    within: list[set[int]] = [set() for _ in range(count)]
    for storage in free:
        within[piece_of[storages[storage].producer]].add(storage)

    # Bytes in memory in addition to the choice, at each op after the pivot.
    others = np.array(timeline.memory_bytes, dtype=np.float64)
    for storage in free:
        others[region.pivot:max(reads[storage]) + 1] -= storages[storage].size_bytes
    piece_around = np.zeros(count)
    for piece, needed in enumerate(within):
        times = [t for s in needed for t in reads[s]]
        piece_around[piece] = max((others[t] for t in times), default=0.0)
    piece_bytes = [float(sum(storages[s].size_bytes for s in group)) for group in within]

    retained, again, cost, around = (np.zeros((count + 1, count + 1)) for _ in range(4))
    for end in range(1, count + 1):
        border = chosen[end - 1].storages if end < count else frozenset()
        wanted = set()
        made = spent = held = most = 0.0
        for start in range(end - 1, -1, -1):
            held += piece_bytes[start]
            most = max(most, piece_around[start])
            wanted |= within[start] - border
            for index in reversed(piece_ops[start]):
                if wanted.intersection(ops[index].outputs):
                    spent += ops[index].cost
                    made += sum(storages[s].size_bytes for s in ops[index].outputs)
                    wanted.update(s for s in ops[index].inputs
                                  if s not in region.forced and s not in border)
            retained[start, end], again[start, end] = held, made
            cost[start, end], around[start, end] = spent, most
    return Chain(chosen, region, retained, again, cost, around,
                 tuple(frozenset(group) for group in within), int(others[region.pivot]))
