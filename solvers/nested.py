"""Checkpoints at evenly spaced places, and eviction between them.

The checkpoints are those of `solvers.sqrt_n`, and never evicted.  A segment is recomputed within
the memory that they leave: its storages are evicted and recomputed as in `solvers.lazy`.  A lazy
walk alone evicts checkpoints of deep networks too, and recomputes long stretches again and again.
"""

from __future__ import annotations

import math

from planner.solvers.frontiers import narrow_frontiers, region_after
from planner.solvers.incremental import drop_recomputes
from planner.solvers.lazy import EvictionHeuristic, counted_walk
from planner.solvers.simulator import simulate, unroll
from planner.solvers.sqrt_n import MOST_SEGMENTS, evenly
from planner.solvers.task import Proposal, Task

_SEGMENTS = (64, 32, 16, 8, 4, 2, 1)
_PATIENCE = 2
"""Numbers of segments without a gain, once a schedule fits, after which the stage ends."""
_HEURISTICS = (EvictionHeuristic(), EvictionHeuristic(distance=0.0))
_RUNS_PER_OP = 3


def nested(task: Task) -> Proposal:
    """Return the cheapest of these schedules within the budget; without one, keep all."""
    problem, budget = task.problem, task.budget_bytes
    region = region_after(problem, unroll(problem, problem.keep_all_schedule).peak_position)
    chain = narrow_frontiers(problem, region, MOST_SEGMENTS)
    best, best_cost, fruitless = problem.keep_all_schedule, math.inf, 0
    for segments in _SEGMENTS:
        if segments > len(chain) + 1:
            continue
        checkpoints = evenly(problem, region.ops, chain, segments)
        cost_before = best_cost
        for heuristic in _HEURISTICS:
            found, _ = counted_walk(problem, budget, heuristic, _RUNS_PER_OP * len(problem) + 200,
                                    checkpoints=checkpoints)
            if found is None:
                continue
            found = drop_recomputes(problem, budget, found)
            peak, cost = simulate(problem, found)
            if peak <= budget and cost < best_cost:
                best, best_cost = found, cost
        fruitless += best_cost == cost_before < math.inf
        if fruitless == _PATIENCE or task.seconds_left <= 0:
            break
    return Proposal(best)
