"""The candidate MILP: choose among given recomputations, with memory exact at every run.

A *template* is a legal schedule with more recomputations than needed; each of them is a *candidate*
that may be used or not.  Per storage, the runs of the template that make or read it cut time into
intervals; the variable A is 1 if the storage is alive throughout the interval.  A read needs A
before it; A may fall anywhere and rises only at a run that makes the storage.  Memory at a run is
then linear.

The optimum is the cheapest sub-schedule of the template, an upper bound for the problem; its
quality depends on the template, which combines *offers*: the recomputations of schedules, and those
of whole blocks.  Memory rows are added only where a solution
violates them, which a few rounds settle.  The model errs on the safe side where it is not exact:
replay state counts up to the last candidate, and a buffer is taken over only where that is certain.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ortools.math_opt.python import mathopt

from planner.solvers.frontiers import Frontier, Region
from planner.solvers.milp import MilpResult, optimise
from planner.solvers.problem import Order, Problem
from planner.solvers.simulator import unroll

MOST_ROUNDS = 25
ROWS_PER_ROUND = 60
PASSES = (1e-3, 1e-4)
"""Gaps of the rounds, as fractions of the keep-all cost: coarse until a schedule fits, then fine.
"""

Moment = tuple[int, int]
"""The next op to run for the first time, and the op that runs right before or as it."""
Literal: TypeAlias = mathopt.Variable | int
"""A variable between 0 and 1, or the constant 0 or 1."""


@dataclass(frozen=True, slots=True)
class CandidateAnswer:
    """The result of one template."""

    schedule: Order | None
    """The cheapest schedule found within the budget."""
    moments: frozenset[Moment]
    """Moments of tight memory, with which the next template starts."""
    settled: bool
    """True if the model was solved to the finest gap of `PASSES`: more time does not help."""
    work: float
    """See `solvers.milp.MilpResult`."""


def best_of_candidates(problem: Problem, budget_bytes: int, template: Order, *, deadline: float,
                       nodes: int | None = None, limit: float = math.inf,
                       all_work: float = math.inf, start: Order | None = None,
                       moments: Iterable[Moment] = (), seed: int = 0) -> CandidateAnswer:
    """Find the cheapest schedule within the budget that only drops recomputations from `template`.
    `nodes` and `limit` (of work) apply to each round of solving; no round begins after `all_work`.

    `start`: such a schedule, to start from.  `moments`: where memory is expected to be tight.
    """
    model = _CandidateModel(problem, budget_bytes, template)
    for moment in sorted(moments):
        model.watch_moment(moment)
    hint = None if start is None else model.used_by(start)
    best, settled, work = None, True, 0.0
    for gap in PASSES:
        for _ in range(MOST_ROUNDS):
            used, answer = model.solve(
                deadline - time.monotonic(), seed, hint, gap, nodes, limit)
            settled, work = answer.solved, work + answer.work
            if used is None:
                return CandidateAnswer(best, model.moments, settled, work)
            schedule, places = model.schedule(used)
            memory = unroll(problem, schedule).memory_bytes
            over = [p for p, held in enumerate(memory) if held > budget_bytes]
            if not over:
                best, hint = schedule, used
                break
            peaks = [p for p in over
                     if (p == 0 or memory[p - 1] <= memory[p])
                     and (p + 1 == len(memory) or memory[p + 1] <= memory[p])]
            peaks.sort(key=lambda p: (-memory[p], p))
            if not sum(model.watch(places[p]) for p in peaks[:ROWS_PER_ROUND]):
                return CandidateAnswer(best, model.moments, settled, work)
            if work >= all_work:
                return CandidateAnswer(best, model.moments, False, work)
        if not settled:
            break  # a finer gap is out of reach
    return CandidateAnswer(best, model.moments, settled, work)


class _CandidateModel:
    """The MILP of one template; memory rows are added one by one.  Mutable."""

    def __init__(self, problem: Problem, budget_bytes: int, template: Order) -> None:
        self._problem, self._budget = problem, budget_bytes
        self._runs = template
        self._segments = unroll(problem, template).segments
        self._mip = mathopt.Model()
        self._watched: set[int] = set()
        self.first: dict[int, int] = {}
        """Position of the first run of each op."""
        self._use: dict[int, mathopt.Variable] = {}
        self._candidates_of: list[list[int]] = [[] for _ in problem.ops]
        for position, op in enumerate(template):
            if op in self.first:
                self._use[position] = self._mip.add_binary_variable()
                self._candidates_of[op].append(position)
            else:
                self.first[op] = position
        self._following = [0] * len(template)
        following = len(problem) - 1
        for position in range(len(template) - 1, -1, -1):
            if position not in self._use:
                following = template[position]
            self._following[position] = following
        self._cost_unit = max((op.cost for op in problem.ops if op.cost > 0), default=1.0) / 1000
        self._mip.minimize(mathopt.LinearSum(
            problem.ops[template[p]].cost / self._cost_unit * x for p, x in self._use.items()))
        self._events: list[list[int]] = []
        self._alive: list[list[Literal]] = []
        self._lay_out()
        self._replay_state = self._held_replay_state()

    def schedule(self, used: set[int]) -> tuple[Order, list[int]]:
        """Return the first runs and the used candidates, and the template position of each."""
        places = [p for p in range(len(self._runs)) if p not in self._use or p in used]
        return tuple(self._runs[p] for p in places), places

    def used_by(self, schedule: Order) -> set[int]:
        """Return the candidates that a schedule uses; those not in the template are left out."""
        used, seen, low, place, waiting = set(), set(), 0, 0, []
        for op in schedule:
            if op in seen:
                waiting.append(op)
                continue
            seen.add(op)
            high = self.first[op]
            for again in waiting:
                candidates = self._candidates_of[again]
                for at in (bisect_left(candidates, start) for start in (place, low)):
                    if at < len(candidates) and candidates[at] < high:
                        used.add(candidates[at])
                        place = candidates[at] + 1
                        break
            low, place, waiting = high, high, []
        return used

    @property
    def moments(self) -> frozenset[Moment]:
        """Moments at which memory is constrained."""
        return frozenset((self._following[p], self._runs[p]) for p in self._watched)

    def watch_moment(self, moment: Moment) -> None:
        """Constrain memory at the run of a moment, if the template has that run."""
        following, op = moment
        end = self.first[following]
        for position in (end, *reversed(self._candidates_of[op])):
            if self._runs[position] == op and self._following[position] == following:
                self.watch(position)
                return

    def watch(self, position: int) -> bool:
        """Require that memory fits at the run at a template position; return whether that is new.
        """
        if position in self._watched:
            return False
        self._watched.add(position)
        problem, op = self._problem, self._problem.ops[self._runs[position]]
        run: Literal = self._use.get(position, 1)
        constant = 0
        terms: dict[mathopt.Variable, int] = {}

        def add(literal: Literal, size: int) -> None:
            nonlocal constant
            if isinstance(literal, int):
                constant += literal * size
            else:
                terms[literal] = terms.get(literal, 0) + size

        add(run, op.workspace_bytes)
        for storage, described in enumerate(problem.storages):
            size = described.size_bytes
            if described.kept_to_end:
                if self.first[described.producer] <= position:
                    constant += size
                if storage in op.outputs and self.first[described.producer] < position:
                    add(run, size)
            elif storage in op.outputs:
                add(self._either(run, self._at(storage, position, after=True)), size)
            else:
                add(self._at(storage, position, after=False), size)
        for again, held in self._replay_state.items():
            if self.first[again] <= position <= self._candidates_of[again][-1]:
                add(held, problem.ops[again].replay_state_bytes)
        taken = self._inplace_reuse(position, run)
        if taken is not None:
            add(taken, -problem.storages[op.outputs[0]].size_bytes)
        unit = max(1.0, self._budget / 1e4)
        row = self._mip.add_linear_constraint(ub=(self._budget - constant) / unit)
        for variable, size in terms.items():
            row.set_coefficient(variable, size / unit)
        return True

    def solve(self, seconds: float, seed: int, hint: set[int] | None, gap: float,
              nodes: int | None, work: float) -> tuple[set[int] | None, MilpResult]:
        """Return the candidates of the cheapest choice found, or `None`, and the result of the
        engine."""
        values = None if hint is None else {x: float(p in hint) for p, x in self._use.items()}
        answer = optimise(self._mip, seconds, seed=seed, hint=values, nodes=nodes,
                          work=work, cutting_planes=False,
                          gap=gap * self._problem.keep_all_cost / self._cost_unit)
        if answer.values is None:
            return None, answer
        return {p for p, x in self._use.items() if answer.values[x] > 0.5}, answer

    def _at(self, storage: int, position: int, *, after: bool) -> Literal:
        """Literal that is 1 if a storage is alive just before or just after a position."""
        events = self._events[storage]
        interval = bisect_left(events, position + after) - 1
        return self._alive[storage][interval] if interval >= 0 else 0

    def _lay_out(self) -> None:
        """Create events, intervals and their rules, storage by storage."""
        births: list[list[int]] = [[] for _ in self._problem.storages]
        reads: list[list[int]] = [[] for _ in self._problem.storages]
        for position, index in enumerate(self._runs):
            for storage in self._problem.ops[index].outputs:
                births[storage].append(position)
            for storage in self._problem.ops[index].inputs:
                reads[storage].append(position)
        for storage, described in enumerate(self._problem.storages):
            if described.kept_to_end:
                self._events.append([])
                self._alive.append([])
                continue
            born = set(births[storage])
            events = sorted((*births[storage], *reads[storage]))
            alive: list[Literal] = [0] * len(events)
            last_read = reads[storage][-1] if reads[storage] else -1
            for i in range(len(events) - 2, -1, -1):
                following = events[i + 1]
                if events[i] >= last_read:
                    continue
                if following not in born and (following not in self._use or _is(alive[i + 1], 1)):
                    alive[i] = 1
                else:
                    alive[i] = self._mip.add_variable(lb=0.0, ub=1.0)
            for i, position in enumerate(events[1:], start=1):
                run = self._use.get(position, 1)
                if position in born:
                    self._at_most(alive[i], alive[i - 1], run)
                else:
                    self._at_most(alive[i], alive[i - 1])
                    self._at_most(run, alive[i - 1])
            self._events.append(events)
            self._alive.append(alive)

    def _at_most(self, literal: Literal, *others: Literal) -> None:
        """literal ≤ sum of others."""
        if _is(literal, 0) or any(_is(other, 1) for other in others):
            return
        row = self._mip.add_linear_constraint(lb=1.0 if isinstance(literal, int) else 0.0)
        if not isinstance(literal, int):
            row.set_coefficient(literal, -1.0)
        for other in others:
            if not isinstance(other, int):
                row.set_coefficient(other, 1.0)

    def _either(self, first: Literal, second: Literal) -> Literal:
        """Return a literal that is at least both."""
        if isinstance(first, int):
            return first or second
        if isinstance(second, int):
            return second or first
        both = self._mip.add_variable(lb=0.0, ub=1.0)
        self._at_most(first, both)
        self._at_most(second, both)
        return both

    def _held_replay_state(self) -> dict[int, mathopt.Variable]:
        held = {}
        for op, candidates in enumerate(self._candidates_of):
            if candidates and self._problem.ops[op].replay_state_bytes:
                held[op] = self._mip.add_variable(lb=0.0, ub=1.0)
                for position in candidates:
                    self._at_most(self._use[position], held[op])
        return held

    def _inplace_reuse(self, position: int, run: Literal) -> mathopt.Variable | None:
        """Return a variable that may be 1 if the run certainly takes over the buffer of an input.
        """
        op = self._problem.ops[self._runs[position]]
        here = self._segments[position]
        options = []
        for storage in op.inplace:
            described = self._problem.storages[storage]
            after = self._at(storage, position, after=True)
            if described.kept_to_end or _is(after, 1):
                continue
            makers = [p for p in (self.first[described.producer],
                                  *self._candidates_of[described.producer]) if p < position]
            option = self._mip.add_variable(lb=0.0, ub=1.0)
            if not isinstance(after, int):
                row = self._mip.add_linear_constraint(ub=1.0)
                row.set_coefficient(option, 1.0)
                row.set_coefficient(after, 1.0)
            if any(self._segments[p] != here for p in makers):
                self._at_most(option, *(self._use[p] for p in makers
                                        if p in self._use and self._segments[p] == here))
            options.append(option)
        if not options:
            return None
        taken = self._mip.add_variable(lb=0.0, ub=1.0)
        self._at_most(taken, *options)
        self._at_most(taken, run)
        return taken


def _is(literal: Literal, value: int) -> bool:
    """Return whether a literal is that constant; variables overload `==`."""
    return isinstance(literal, int) and literal == value


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


def template(problem: Problem, base: Order, *offers: Offers) -> Order:
    """Return the schedule `base` with all offered recomputations: before each first run, those of
    `base` in their order, and each other one before the first of these that is of a later op."""
    schedule: list[int] = []
    recomputed: list[int] = []
    seen = [False] * len(problem)
    for op in (*base, len(problem)):
        if op < len(problem) and seen[op]:
            recomputed.append(op)
            continue
        others = sorted(set().union(*(offer.get(op, ()) for offer in offers))
                        - set(recomputed))
        for again in recomputed:
            while others and others[0] < again:
                schedule.append(others.pop(0))
            schedule.append(again)
        schedule += others
        recomputed = []
        if op < len(problem):
            schedule.append(op)
            seen[op] = True
    return tuple(schedule)
