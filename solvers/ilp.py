"""Schedules from the time-cut MILP, with adaptive cuts, anchors and slots.

One cut at the peak of the plain order gives a bound and a choice of what to retain past it.
Recomputing the rest just in time gives a schedule; where it fits at the cost of the model, it is
proven optimal.  Where it does not fit, there are three ways on.  *Anchors*, frontiers that have to
be retained so that recomputations stay short (found by the dynamic program of `solvers.dp`), give
schedules that fit.  *Slots* (`solvers.slot_model`) take the recomputations of all schedules found so
far, whether they fit or not, and choose anew among them.  Further *cuts* where memory is exceeded
raise the bound and offer new recomputations.
"""

from __future__ import annotations

import time

from solvers.cut_model import CutModel
from solvers.dp import Chain
from solvers.frontiers import narrow_frontiers, region_after
from solvers.incumbent import Incumbent
from solvers.problem import Problem, Schedule
from solvers.realise import realise
from solvers.simulator import Timeline, unroll
from solvers.slot_model import best_of_slots
from solvers.slots import Gaps, block_gaps, gaps_of, template
from solvers.task import Proposal, Task

ANCHOR_ROUNDS = 6
NEW_CUTS = 3
"""Cuts added per round, at the worst violations."""
MOST_FRONTIERS = 128
FIRST_ROUND_SECONDS = 1.0
"""Time for one model in the first round, per 500 ops; doubled from round to round."""


def ilp(task: Task) -> Proposal:
    """The best schedule that the time-cut MILP leads to within the time limit."""
    incumbent = Incumbent(task)
    if incumbent.ensure_fit():
        search_cuts(task, incumbent)
    return incumbent.proposal()


def search_cuts(task: Task, incumbent: Incumbent) -> None:
    """Improve an incumbent by cuts, anchors and slots until it is proven, the ideas run out or the
    time is over."""
    problem, budget = task.problem, task.budget_bytes
    if incumbent.proven:
        return
    pivot = unroll(problem, problem.plain_schedule).peak_position
    cuts: tuple[int, ...] = (pivot,)
    first = CutModel(problem, budget, cuts).solve(task.seconds_left / 3, seed=task.seed)
    incumbent.raise_bound(first.extra_bound)
    if first.retained is None:
        return
    relaxed = realise(problem, cuts, first.retained)
    incumbent.offer(relaxed)
    incumbent.report("one cut")
    if incumbent.proven:
        return
    _anchored(task, incumbent, pivot)
    blocks = _blocks(problem, pivot)
    moments = frozenset({(pivot, pivot)})
    round_seconds = FIRST_ROUND_SECONDS * max(1.0, len(problem) / 500)
    settled = False
    while not incumbent.proven and not settled and task.seconds_left > 0:
        cost = incumbent.cost
        offered = template(problem, gaps_of(problem, [relaxed, incumbent.schedule]), blocks)
        answer = best_of_slots(
            problem, budget, offered, start=incumbent.schedule, moments=moments, seed=task.seed,
            round_seconds=round_seconds,
            deadline=time.monotonic() + min(4 * round_seconds, task.seconds_left / 2))
        if answer.schedule is not None:
            incumbent.offer(answer.schedule)
        incumbent.report("slots")
        if incumbent.proven:
            return
        moments = answer.moments
        added = _violated(problem, unroll(problem, relaxed), budget, cuts)
        cuts = tuple(sorted({*cuts, *added}))
        solution = CutModel(problem, budget, cuts).solve(
            min(2 * round_seconds, task.seconds_left / 2), seed=task.seed, hint=incumbent.schedule)
        incumbent.raise_bound(solution.extra_bound)
        if solution.retained is None:
            return
        relaxed = realise(problem, cuts, solution.retained)
        incumbent.offer(relaxed)
        incumbent.report(f"{len(cuts)} cuts")
        settled = (answer.settled and solution.solved and not added and incumbent.cost >= cost)
        round_seconds *= 2


def _blocks(problem: Problem, pivot: int) -> Gaps:
    region = region_after(problem, pivot)
    return block_gaps(problem, region, narrow_frontiers(problem, region, MOST_FRONTIERS))


def _anchored(task: Task, incumbent: Incumbent, pivot: int) -> None:
    """One cut, with a chain of frontiers retained: bisect for the most room that really fits."""
    problem, budget = task.problem, task.budget_bytes
    chain = Chain.of(problem)
    low, high = 0.0, 1.0
    for round_ in range(ANCHOR_ROUNDS):
        factor = 1.0 if round_ == 0 else (low + high) / 2
        anchors = chain.anchors(int(budget * factor))
        if anchors is None:
            low = factor
            continue
        solution = CutModel(problem, budget, (pivot,), anchors=anchors,
                            room_bytes=(int(budget * factor),)).solve(
                                min(2.0, task.seconds_left / 4), seed=task.seed)
        if solution.retained is None:
            low = factor
            continue
        schedule = realise(problem, (pivot,), solution.retained)
        peak = incumbent.offer(schedule)
        if peak <= budget:
            if factor == 1.0:
                break
            low = factor
        else:
            high = factor
        if incumbent.proven or task.seconds_left <= 0:
            break
    incumbent.report("anchored")


def _violated(problem: Problem, timeline: Timeline, budget: int,
              cuts: tuple[int, ...]) -> list[int]:
    """First runs at or next to the worst violations, not cuts yet; at most `NEW_CUTS`."""
    excess: dict[int, int] = {}
    following = len(problem)
    seen_later: set[int] = set()
    firsts = {index: position for position, index in reversed(
        list(enumerate(timeline.schedule)))}
    for position in range(len(timeline.schedule) - 1, -1, -1):
        index = timeline.schedule[position]
        if firsts[index] == position:
            following = index
        over = timeline.memory_bytes[position] - budget
        if over > 0:
            for place in (following, following - 1):
                if 0 <= place < len(problem) and place not in cuts and place not in seen_later:
                    excess[place] = max(excess.get(place, 0), over)
    chosen: list[int] = []
    for place in sorted(excess, key=lambda p: (-excess[p], p)):
        if all(abs(place - other) > 3 for other in chosen):
            chosen.append(place)
        if len(chosen) == NEW_CUTS:
            break
    return chosen
