"""Templates for the candidate MILP: recomputations to offer, and their places."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from planner.solvers.frontiers import Frontier, Region
from planner.solvers.problem import Order, Problem

Offers = dict[int, set[int]]
"""Per op, the recomputations offered just before its first run (`len(problem)`: after the last)."""


def offers_of(problem: Problem, schedules: Iterable[Order]) -> Offers:
    """Return the recomputations of several schedules together."""
    offers: Offers = {}
    for schedule in schedules:
        seen = [False] * len(problem)
        waiting: set[int] = set()
        for op in schedule:
            if seen[op]:
                waiting.add(op)
                continue
            seen[op] = True
            if waiting:
                offers.setdefault(op, set()).update(waiting)
                waiting = set()
    return offers


def block_offers(problem: Problem, region: Region, chain: tuple[Frontier, ...]) -> Offers:
    """Offer, for each op after the pivot, its inputs and the recomputations that they need within
    the same stretch between frontiers.  A recomputation that an earlier op offers is offered again
    only to its readers."""
    bounds = [frontier.position for frontier in chain]
    members = set(region.ops)
    offers: Offers = {}
    asked: set[int] = set()
    for first in range(region.pivot + 1, len(problem)):
        read = {problem.storages[s].producer for s in problem.ops[first].inputs}
        stack = [v for v in read if v in members]
        offered = set(stack)
        while stack:
            index = stack.pop()
            stretch = bisect_right(bounds, index)
            for storage in problem.ops[index].inputs:
                source = problem.storages[storage].producer
                if (source in members and source not in offered and source not in asked
                        and bisect_right(bounds, source) == stretch):
                    offered.add(source)
                    stack.append(source)
        asked |= offered
        allowed = {v for v in offered if problem.may_replay(v, first)}
        if allowed:
            offers[first] = allowed
    return offers


def template(problem: Problem, *offers: Offers) -> Order:
    """Return the schedule with all offered recomputations, in the order of the ops before each
    first run."""
    schedule: list[int] = []
    for first in range(len(problem)):
        schedule.extend(sorted(set().union(*(offer.get(first, ()) for offer in offers))))
        schedule.append(first)
    return tuple(schedule)
