"""Schedules from the time-cut MILP, with adaptive cuts and anchors.

One cut at the peak of the plain order gives a bound and a choice of what to retain past it.
Recomputing the rest just in time gives a schedule; where it fits at the cost of the model, it is
proven optimal.  Where it does not fit, there are two ways on: *anchors*, frontiers that have to be
retained so that recomputations stay short (found by the dynamic program of `solvers.dp`), give
schedules that fit; further *cuts* where memory is exceeded raise the bound and often fit as well.
"""

from __future__ import annotations

from solvers.cut_model import CutModel
from solvers.dp import Chain
from solvers.incumbent import Incumbent
from solvers.problem import Problem, Schedule
from solvers.realise import realise
from solvers.simulator import Timeline, unroll
from solvers.task import Proposal, Task

ANCHOR_ROUNDS = 8
NEW_CUTS = 3
"""Cuts added per round, at the worst violations."""


def ilp(task: Task) -> Proposal:
    """The best schedule that the time-cut MILP leads to within the time limit."""
    incumbent = Incumbent(task)
    if incumbent.ensure_fit():
        search_cuts(task, incumbent)
    return incumbent.proposal()


def search_cuts(task: Task, incumbent: Incumbent) -> None:
    """Improve an incumbent by cuts and anchors until it is proven or the time is over."""
    problem, budget = task.problem, task.budget_bytes
    if incumbent.proven:
        return
    pivot = unroll(problem, problem.plain_schedule).peak_position
    first = CutModel(problem, budget, (pivot,)).solve(task.seconds_left, seed=task.seed)
    incumbent.raise_bound(first.extra_bound)
    if first.retained is None:
        return
    schedule = realise(problem, (pivot,), first.retained)
    incumbent.offer(schedule)
    incumbent.report("one cut")
    if not incumbent.proven:
        _anchored(task, incumbent, pivot)
    if not incumbent.proven:
        _more_cuts(task, incumbent, (pivot,), schedule)


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
                                task.seconds_left / 4, seed=task.seed)
        if solution.retained is None:
            low = factor
            continue
        peak = incumbent.offer(realise(problem, (pivot,), solution.retained))
        if peak <= budget:
            if factor == 1.0:
                break
            low = factor
        else:
            high = factor
        incumbent.report("anchored")
        if incumbent.proven or task.seconds_left <= 0:
            break


def _more_cuts(task: Task, incumbent: Incumbent, cuts: tuple[int, ...],
               schedule: Schedule) -> None:
    """Add cuts where memory is exceeded until the schedule fits or the time is over."""
    problem, budget = task.problem, task.budget_bytes
    while task.seconds_left > 0:
        added = _violated(problem, unroll(problem, schedule), budget, cuts)
        if not added:
            return
        cuts = tuple(sorted({*cuts, *added}))
        solution = CutModel(problem, budget, cuts).solve(
            task.seconds_left, seed=task.seed)
        incumbent.raise_bound(solution.extra_bound)
        if solution.retained is None:
            return
        schedule = realise(problem, cuts, solution.retained)
        incumbent.offer(schedule)
        incumbent.report(f"{len(cuts)} cuts")
        if incumbent.proven:
            return


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
