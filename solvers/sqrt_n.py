"""Checkpoint at evenly spaced places, recompute each segment once.

T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016
(arXiv:1604.06174), generalised from chains to graphs: a checkpoint is a narrow frontier (see
`solvers.frontiers`), and segments hold about equal bytes.  The cheapest segment count within the
budget is used, as in the paper's budget search.
"""

from __future__ import annotations

from bisect import bisect_left

from planner.solvers.frontiers import Frontier, narrow_frontiers, region_after
from planner.solvers.problem import Problem
from planner.solvers.schedule_from_cuts import schedule_from_cuts
from planner.solvers.simulator import simulate, unroll
from planner.solvers.task import Proposal, Task

MOST_SEGMENTS = 64


def sqrt_n(task: Task) -> Proposal:
    """Return the cheapest number of equal segments within the budget."""
    problem = task.problem
    timeline = unroll(problem, problem.keep_all_schedule)
    best = problem.keep_all_schedule
    best_peak, best_cost = timeline.peak_bytes, timeline.cost
    pivot = timeline.peak_position
    region = region_after(problem, pivot)
    chain = narrow_frontiers(problem, region, MOST_SEGMENTS)
    tried: set[frozenset[int]] = set()
    for segments in range(1, len(chain) + 2):
        retained = region.forced | evenly(problem, region.ops, chain, segments)
        if retained in tried:
            continue
        tried.add(retained)
        schedule = schedule_from_cuts(problem, (pivot,), (retained,))
        peak, cost = simulate(problem, schedule)
        fits, best_fits = peak <= task.budget_bytes, best_peak <= task.budget_bytes
        if (fits and (not best_fits or cost < best_cost)) or (
                not fits and not best_fits and peak < best_peak):
            best, best_peak, best_cost = schedule, peak, cost
        if task.seconds_left <= 0:
            break
    return Proposal(best)


def evenly(problem: Problem, ops: tuple[int, ...], chain: tuple[Frontier, ...],
           segments: int) -> frozenset[int]:
    """Return the storages of the frontiers nearest to the places that split the ops into segments
    of equal bytes."""
    if segments <= 1 or not chain:
        return frozenset()
    made = [0]
    for index in ops:
        made.append(made[-1] + sum(problem.storages[s].size_bytes
                                   for s in problem.ops[index].outputs))
    at = {index: made[i] for i, index in enumerate(ops)}
    marks = [at[f.position] for f in chain]
    chosen: set[int] = set()
    for k in range(1, segments):
        target = made[-1] * k / segments
        right = bisect_left(marks, target)
        near = min((i for i in (right - 1, right) if 0 <= i < len(marks)),
                   key=lambda i: abs(marks[i] - target))
        chosen |= chain[near].storages
    return frozenset(chosen)
