"""Schedules from the time-cut MILP, with adaptive cuts and candidate recomputations.

One cut at the peak of the keep-all order gives a bound and a choice of storages to retain past it.
Recomputing the rest just in time gives a schedule; if it fits at the cost of the model, it is
proven optimal.  If it does not fit, there are two ways on.  *Candidates*
(`solvers.candidate_model`) are the recomputations of the schedules found so far, whether they fit
or not; a model chooses again among them.  Further *cuts* where memory is exceeded raise the bound
and offer new recomputations.  Repeated layers
(`solvers.repetition`) are counted in the models of cuts, which are then no larger for a deeper
network.
"""

from __future__ import annotations

import math

from planner.solvers.candidate_model import best_of_candidates, block_offers, offers_of, template
from planner.solvers.cut_model import CutModel
from planner.solvers.frontiers import narrow_frontiers, region_after, waists
from planner.solvers.incumbent import Incumbent
from planner.solvers.minimum import working_set_floor
from planner.solvers.repetition import runs_of
from planner.solvers.schedule_from_cuts import next_cuts, schedule_from_cuts
from planner.solvers.simulator import unroll
from planner.solvers.task import Proposal, Task

COARSE_GAP, SHARE_OF_GAP = 2e-4, 0.2
"""Models with cuts are solved to within this fraction of the keep-all cost or, if that is more,
this share of the incumbent's gap; and to the end only if that could close the proof."""
FIRST_NODES = 20
"""Nodes of the first search for one model; doubled if they do not suffice.  Nodes measure work,
since with time the result would depend on the load of the machine."""
CUT_NODES = 20
"""Factor on the nodes of models with cuts, which must be solved before the next cut makes sense.
Candidate models yield schedules on the way."""
SHARE_OF_MODEL = 0.25
"""Fraction of the remaining work that one model may use."""


def ilp(task: Task) -> Proposal:
    """Return the best schedule that the time-cut MILP leads to within the time limit."""
    incumbent = Incumbent(task)
    if incumbent.start() and not incumbent.proven:
        search = CutSearch(task, incumbent)
        while not search.settled and task.seconds_left > 0:
            search.turn()
    return incumbent.proposal()


def one_cut_bound(task: Task) -> float:
    """Lower bound on the recomputation cost of every schedule within the budget, from the model
    with one cut; 0 if the working sets alone exceed the budget."""
    problem = task.problem
    if working_set_floor(problem) > task.budget_bytes:
        return 0.0
    pivot = unroll(problem, problem.keep_all_schedule).peak_position
    solution = CutModel(problem, task.budget_bytes, (pivot,), runs=runs_of(problem)).solve(
        max(1.0, task.seconds_left), seed=task.seed, gap=COARSE_GAP * problem.keep_all_cost,
        nodes=FIRST_NODES)
    return solution.extra_bound if math.isfinite(solution.extra_bound) else 0.0


class CutSearch:
    """Models of cuts and of candidates, in turns, that improve an incumbent.  Mutable.

    The kind that has used less work has the next turn.  Work is counted, not timed: apart from the
    deadline, the search does not depend on the speed of the machine.
    """

    def __init__(self, task: Task, incumbent: Incumbent) -> None:
        """Solve with one cut, at the peak of the keep-all order."""
        problem = task.problem
        self._task, self._incumbent = task, incumbent
        self.work_limit = math.inf if task.work_limit is None else task.work_limit
        """Work of all turns after which the search is to end."""
        pivot = unroll(problem, problem.keep_all_schedule).peak_position
        self._runs = runs_of(problem)
        self._cuts: tuple[int, ...] = (pivot,)
        self._moments = frozenset({(pivot, pivot)})
        self._relaxed = problem.keep_all_schedule
        self._cut_nodes = self._candidate_nodes = FIRST_NODES
        self._cut_work = self._candidate_work = self._last_cut_work = 0.0
        self._cuts_solved = self._cuts_settled = self._candidates_settled = False
        self._cut()
        region = region_after(problem, pivot)
        self._blocks = block_offers(problem, region, waists(
            narrow_frontiers(problem, region, len(problem))))

    @property
    def settled(self) -> bool:
        """True if the incumbent is proven, or if further turns would find nothing new."""
        return self._incumbent.proven or (self._cuts_settled and self._candidates_settled)

    @property
    def work(self) -> float:
        """Work of all turns, see `solvers.milp.MilpResult`."""
        return self._cut_work + self._candidate_work

    @property
    def _work_for_model(self) -> float:
        """Work that the next model may use."""
        return SHARE_OF_MODEL * max(0.0, self.work_limit - self.work)

    def turn(self) -> None:
        """Choose among candidates, or solve with further cuts."""
        if not self._candidates_settled and (
                self._cuts_settled or self._candidate_work <= self._cut_work):
            self._choose_candidates()
        else:
            self._cut_again()

    def _cut_again(self) -> None:
        """Solve the last model with more nodes if it was not solved, else one with a further cut.
        If there is no cut to add, distinguish all ops, which may raise the bound.  No model is
        begun that, by the work of the last one, would take more than is left."""
        expected_work = self._last_cut_work
        if not self._cuts_solved:
            self._cut_nodes *= 2
        elif not self._add_cuts():
            op_count = len(self._task.problem)
            expected_work *= op_count / (op_count - sum(run.spared for run in self._runs))
            self._cuts_settled = not self._runs
            self._runs = ()
        self._cuts_settled |= expected_work > self.work_limit - self.work
        if not self._cuts_settled:
            self._cut()

    def _add_cuts(self) -> bool:
        """Constrain memory also where the last solution of the model exceeds the budget most;
        return whether there is such a place."""
        found = next_cuts(self._task.problem, self._task.budget_bytes, self._relaxed, self._cuts)
        if found is not None:
            self._cuts = found
        return found is not None

    def _cut(self) -> None:
        """Solve the model of the current cuts."""
        task, incumbent = self._task, self._incumbent
        model = CutModel(task.problem, task.budget_bytes, self._cuts, runs=self._runs)
        coarse = max(COARSE_GAP, SHARE_OF_GAP * incumbent.gap if incumbent.fits else 0.0)
        before = self._cut_work
        for gap in (coarse * task.problem.keep_all_cost, 0.0):
            solution = model.solve(
                task.seconds_left, seed=task.seed, gap=gap, nodes=CUT_NODES * self._cut_nodes,
                work=self._work_for_model)
            self._cut_work += solution.work
            self._cuts_solved = solution.solved
            incumbent.raise_bound(solution.extra_bound)
            if solution.retained is not None:
                for early in (False, True)[:len(self._cuts)]:
                    self._relaxed = schedule_from_cuts(task.problem, self._cuts, solution.retained,
                                                       early=early)
                    incumbent.offer(self._relaxed)
                self._candidates_settled = False
            elif solution.solved:
                self._cuts_settled = self._candidates_settled = True  # no schedule fits
            proof_in_reach = incumbent.cost - incumbent.lower_bound <= 2 * gap
            if incumbent.proven or not (incumbent.fits and proof_in_reach):
                break
        self._last_cut_work = self._cut_work - before
        incumbent.report(f"{len(self._cuts)} cuts" if len(self._cuts) > 1 else "one cut")

    def _choose_candidates(self) -> None:
        """Choose again among the known recomputations, then also among those of whole blocks."""
        task, incumbent = self._task, self._incumbent
        before = incumbent.schedule
        known = offers_of(task.problem, [self._relaxed, *task.ideas])
        for offers in ((known,), (known, self._blocks)):
            answer = best_of_candidates(
                task.problem, task.budget_bytes, template(task.problem, before, *offers),
                start=incumbent.schedule if incumbent.fits else None, moments=self._moments,
                seed=task.seed, nodes=self._candidate_nodes, limit=self._work_for_model,
                all_work=self.work_limit - self.work, deadline=task.deadline)
            self._moments = answer.moments
            self._candidate_work += answer.work
            if answer.schedule is not None:
                incumbent.offer(answer.schedule)
            incumbent.report("candidates" if len(offers) == 1 else "candidates of blocks")
            if incumbent.gap <= COARSE_GAP or (
                    len(offers) == 1 and incumbent.fits and not self._cuts_settled
                    and self._candidate_work > self._cut_work):
                break
        if answer.settled:
            self._candidates_settled = len(offers) > 1 and before == incumbent.schedule
        else:
            self._candidate_nodes *= 2
