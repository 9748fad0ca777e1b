"""Schedules from the time-cut MILP, with adaptive cuts, anchors and slots.

One cut at the peak of the plain order gives a bound and a choice of what to retain past it.
Recomputing the rest just in time gives a schedule; where it fits at the cost of the model, it is
proven optimal.  Where it does not fit, there are three ways on.  *Anchors*, frontiers that have to
be retained so that recomputations stay short (found by the dynamic program of `solvers.dp`), give
schedules that fit.  *Slots* (`solvers.slot_model`) take the recomputations of schedules found so
far, whether they fit or not, and choose anew among them.  Further *cuts* where memory is exceeded
raise the bound and offer new recomputations.
"""

from __future__ import annotations

import time

from solvers.cut_model import CutModel
from solvers.dp import Chain
from solvers.frontiers import narrow_frontiers, region_after, waists
from solvers.incumbent import Incumbent
from solvers.problem import Problem
from solvers.realise import realise
from solvers.simulator import Timeline, unroll
from solvers.slot_model import best_of_slots
from solvers.slots import block_gaps, gaps_of, template
from solvers.task import Proposal, Task

ANCHOR_ROUNDS = 6
GENEROSITY = 3.0
COARSE_GAP = 5e-4
"""Models with cuts are solved to within this fraction of the plain cost, and to the end only where
that could close the proof."""
FIRST_ROUND_NODES = 50
"""Nodes of the search for one model in the first round; doubled from round to round.  Time is no
measure of work: the result would depend on what else the machine does."""
GUARD_SECONDS = 6.0
"""No model gets more time than this in the first round, per 500 ops; doubled as well."""
ANCHOR_NODES = 20
"""Nodes for each model with anchors."""


def ilp(task: Task) -> Proposal:
    """The best schedule that the time-cut MILP leads to within the time limit."""
    incumbent = Incumbent(task)
    incumbent.start()
    if incumbent.possible and not incumbent.proven:
        search = CutSearch(task, incumbent)
        while not search.settled and task.seconds_left > 0:
            search.round()
            if not incumbent.ensure_fit():
                break
        incumbent.ensure_fit()
    return incumbent.proposal()


class CutSearch:
    """Rounds of slots and cuts that improve an incumbent, each with twice the time of the one
    before.  Mutable."""

    def __init__(self, task: Task, incumbent: Incumbent) -> None:
        """Solve with one cut, at the peak of the plain order."""
        problem = task.problem
        self._task, self._incumbent = task, incumbent
        self.settled = False
        """The incumbent is proven, or further rounds would bring nothing new."""
        pivot = unroll(problem, problem.plain_schedule).peak_position
        self._cuts: tuple[int, ...] = (pivot,)
        self._inner: tuple[tuple[int, int], ...] = ()
        self._moments = frozenset({(pivot, pivot)})
        self._nodes = FIRST_ROUND_NODES
        self._guard_seconds = GUARD_SECONDS * max(1.0, len(problem) / 500)
        self._relaxed = problem.plain_schedule
        self._anchored = False
        self._cut(20 * FIRST_ROUND_NODES, task.seconds_left / 3)
        region = region_after(problem, pivot)
        self._blocks = block_gaps(problem, region, waists(
            narrow_frontiers(problem, region, len(problem))))

    def round(self) -> None:
        """Anchors at first, then slots, then new cuts."""
        if not self._anchored:
            self._anchored = True
            _offer_anchored(self._task, self._incumbent, self._cuts[0])
        before = self._incumbent.cost, self._incumbent.fits
        slots_settled = self._choose_slots()
        if self._incumbent.proven:
            self.settled = True
        if self.settled:
            return
        added = self._add_cuts()
        cuts_settled = self._cut(2 * self._nodes, self._guard)
        unchanged = before == (self._incumbent.cost, self._incumbent.fits)
        self.settled |= slots_settled and cuts_settled and not added and unchanged
        self._nodes *= 2
        self._guard_seconds *= 2

    @property
    def _guard(self) -> float:
        return min(self._guard_seconds, self._task.seconds_left / 2)

    def _add_cuts(self) -> bool:
        """Look at memory where the last solution of the model exceeds the budget most, too; whether
        there is such a place."""
        problem = self._task.problem
        timeline = unroll(problem, self._relaxed)
        for following, op in _violations(problem, timeline, self._task.budget_bytes):
            if following == op and op not in self._cuts:
                self._cuts = tuple(sorted({*self._cuts, op}))
                return True
            if op < following < len(problem) and (following, op) not in self._inner:
                self._inner = tuple(sorted({*self._inner, (following, op)}))
                self._cuts = tuple(sorted({*self._cuts, following - 1, following}))
                return True
        return False

    def _cut(self, nodes: int, seconds: float) -> bool:
        """Solve the model of the present cuts; whether to the end."""
        task, incumbent = self._task, self._incumbent
        model = CutModel(task.problem, task.budget_bytes, self._cuts, inner=self._inner)
        deadline = time.monotonic() + seconds
        for gap in (COARSE_GAP * task.problem.plain_cost, 0.0):
            solution = model.solve(
                deadline - time.monotonic(), seed=task.seed, gap=gap, nodes=nodes,
                hint=incumbent.schedule if incumbent.fits else None)
            incumbent.raise_bound(solution.extra_bound)
            if solution.retained is not None:
                self._relaxed = realise(task.problem, self._cuts, solution.retained)
                incumbent.offer(self._relaxed)
            elif solution.solved:
                self.settled = True  # no schedule fits
            proof_in_reach = incumbent.cost - incumbent.lower_bound <= 2 * gap
            if incumbent.proven or not (incumbent.fits and proof_in_reach):
                break
        incumbent.report(f"{len(self._cuts)} cuts" if len(self._cuts) > 1 else "one cut")
        self.settled |= incumbent.proven
        return solution.solved

    def _choose_slots(self) -> bool:
        """Choose anew among the recomputations known, then also among those of whole blocks;
        whether that was solved to the end."""
        task, incumbent = self._task, self._incumbent
        known = gaps_of(task.problem, [self._relaxed, incumbent.schedule, *task.ideas])
        settled = False
        for offers in ((known,), (known, self._blocks)):
            answer = best_of_slots(
                task.problem, task.budget_bytes, template(task.problem, *offers),
                start=incumbent.schedule if incumbent.fits else None, moments=self._moments,
                seed=task.seed, nodes=self._nodes, deadline=time.monotonic() + self._guard)
            self._moments = answer.moments
            if answer.schedule is not None:
                incumbent.offer(answer.schedule)
            incumbent.report("slots" if len(offers) == 1 else "slots of blocks")
            settled = answer.settled
            if incumbent.gap <= COARSE_GAP:
                break
        return settled


def _offer_anchored(task: Task, incumbent: Incumbent, pivot: int) -> None:
    """One cut, with a chain of frontiers retained: bisect for the most room that really fits."""
    problem, budget = task.problem, task.budget_bytes
    chain = Chain.of(problem)
    low, high = 0.0, 1.0
    for round_ in range(ANCHOR_ROUNDS):
        factor = 1.0 if round_ == 0 else (low + high) / 2
        anchors = chain.anchors(int(budget * factor))
        if anchors is None:  # what a segment needs is overestimated: try its frontiers all the same
            anchors = chain.anchors(int(budget * factor), generosity=GENEROSITY)
        if anchors is None:
            low = factor
            continue
        solution = CutModel(problem, budget, (pivot,), anchors=anchors,
                            room_bytes=(int(budget * factor),)).solve(
                                task.seconds_left / 4, seed=task.seed, nodes=ANCHOR_NODES,
                                gap=COARSE_GAP * problem.plain_cost)
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


def _violations(problem: Problem, timeline: Timeline, budget: int) -> list[tuple[int, int]]:
    """Where memory is over the budget, at its local peaks, worst first: the first run that comes
    next, and the op that runs (the same one, or one that is recomputed before it)."""
    memory = timeline.memory_bytes
    firsts = {op: position for position, op in reversed(list(enumerate(timeline.schedule)))}
    following = len(problem)
    found: list[tuple[int, int, int]] = []
    for position in range(len(memory) - 1, -1, -1):
        op = timeline.schedule[position]
        if firsts[op] == position:
            following = op
        before = memory[position - 1] if position else -1
        after = memory[position + 1] if position + 1 < len(memory) else -1
        if memory[position] > budget and before <= memory[position] > after:
            found.append((-memory[position], following, op))
    return [(following, op) for _, following, op in sorted(found)]
