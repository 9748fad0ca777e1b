"""MOCCASIN: retention intervals under CP-SAT (Bartan et al., ICML 2023, arXiv:2304.14463).

Stage j ends with the first run of op j and has an event for each op up to j, in their order.  Every
op has up to `INTERVALS` runs, each at an event of its own column, and every run an interval
of retention per output, to some later event.  A run reads an input from an interval that is open
there; the intervals' sizes stay within the budget at every event (one cumulative constraint).

Class of schedules: at most `INTERVALS` runs per op, at most one run of an op per stage, a stage's
runs in the order of the ops.  Memory is modelled from the safe side: nothing runs in place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ortools.sat.python import cp_model

from solvers.problem import Order, Problem
from solvers.simulator import simulate
from solvers.task import Proposal, Task

INTERVALS = 2
"""Runs per op, at most: the paper's C."""
_WORKERS = 2
_COST_UNITS = 1_000_000  # of the dearest run, in the model's integer objective


def moccasin(task: Task) -> Proposal:
    """The best schedule that CP-SAT finds in time, with the bound of keeping everything.

    The warm start is hinted at; its first runs beyond `INTERVALS` per op are left out.
    """
    problem = task.problem
    program = _Program(problem, task.budget_bytes)
    if task.warm_start is not None:
        program.hint(task.warm_start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, task.deadline - time.monotonic())
    solver.parameters.num_workers = _WORKERS
    solver.parameters.random_seed = task.seed % (1 << 31)
    status = solver.solve(program.model)
    bound = problem.keep_all_cost + solver.best_objective_bound * program.cost_unit
    task.report(f"moccasin: no schedule of its class costs less than {bound:.6g}")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proposal(problem.keep_all_schedule, problem.keep_all_cost)
    schedule = program.schedule(solver)
    if simulate(problem, schedule).peak_bytes > task.budget_bytes:
        raise AssertionError("CP-SAT broke its own cumulative constraint")  # pragma: no cover
    return Proposal(schedule, problem.keep_all_cost)


def _event(stage: int, op: int) -> int:
    return stage * (stage + 1) // 2 + op


class _Program:
    """The CP-SAT model of one problem and its budget."""

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        self.problem = problem
        self.model = cp_model.CpModel()
        count = len(problem)
        self.horizon = _event(count, 0)  # one past the last event
        self.starts: list[list[cp_model.LinearExprT]] = []
        self.active: list[list[cp_model.LiteralT]] = []
        self.spans: list[cp_model.IntervalVar] = []
        self.demands: list[int] = []
        self.ends: list[list[cp_model.IntVar]] = [[] for _ in problem.storages]
        for op in range(count):
            self._runs(op)
        for op in range(count):
            self._reads(op)
        self.model.add_cumulative(self.spans, self.demands, budget_bytes)
        dearest = max((op.cost for op in problem.ops), default=0.0)
        self.cost_unit = dearest / _COST_UNITS or 1.0
        self.model.minimize(sum(
            round(problem.ops[op].cost / self.cost_unit) * literal
            for op in range(count) for literal in self.active[op][1:]))

    def _runs(self, op: int) -> None:
        """The runs of an op and the retention intervals of its outputs."""
        problem, model = self.problem, self.model
        described = problem.ops[op]
        stages = [t for t in range(op + 1, len(problem)) if problem.may_replay(op, t)]
        starts: list[cp_model.LinearExprT] = [_event(op, op)]
        active: list[cp_model.LiteralT] = [True]
        domain = cp_model.Domain.from_values([_event(t, op) for t in stages])
        for _ in range(min(INTERVALS - 1, len(stages))):
            literal = model.new_bool_var("")
            start = model.new_int_var_from_domain(domain, "")
            if active[-1] is not True:
                model.add_implication(literal, active[-1])
            model.add(start > starts[-1]).only_enforce_if(literal)
            starts.append(start)
            active.append(literal)
        self.starts.append(starts)
        self.active.append(active)
        for start, literal in zip(starts, active, strict=True):
            if described.workspace_bytes:
                self._span(start, start + 1, literal, described.workspace_bytes)
            for storage in described.outputs:
                first = literal is True
                if problem.storages[storage].kept_to_end:
                    end: cp_model.LinearExprT = self.horizon - 1 if first else start
                else:
                    end = model.new_int_var(_event(op, op), self.horizon - 1, "")
                    self.ends[storage].append(end)
                    model.add(end >= start).only_enforce_if(literal)
                self._span(start, end + 1, literal, problem.storages[storage].size_bytes)
        if described.replay_state_bytes:
            for start, literal in zip(starts[1:], active[1:], strict=True):
                # From the first run to this one; the latest one covers the others, which count on
                # top of it: from the safe side where there are more than two runs.
                self._span(starts[0], start + 1, literal, described.replay_state_bytes)

    def _span(self, start: cp_model.LinearExprT, stop: cp_model.LinearExprT,
              literal: cp_model.LiteralT, demand: int) -> None:
        """Memory held from `start` to just before `stop`."""
        if not demand:
            return
        length = self.model.new_int_var(1, self.horizon, "")
        self.spans.append(
            self.model.new_optional_interval_var(start, length, stop, literal, ""))
        self.demands.append(demand)

    def _reads(self, op: int) -> None:
        """Each run of an op reads each input from one interval that is open at it."""
        problem, model = self.problem, self.model
        for storage in problem.ops[op].inputs:
            if problem.storages[storage].kept_to_end:
                continue
            producer = problem.storages[storage].producer
            for here, running in zip(self.starts[op], self.active[op], strict=True):
                choices = []
                for made, exists, end in zip(self.starts[producer], self.active[producer],
                                             self.ends[storage], strict=True):
                    choice = model.new_bool_var("")
                    choices.append(choice)
                    model.add(made < here).only_enforce_if(choice)
                    model.add(end >= here).only_enforce_if(choice)
                    if exists is not True:
                        model.add_implication(choice, exists)
                if running is True:
                    model.add_exactly_one(choices)
                else:
                    model.add(sum(choices) == running)

    def schedule(self, solver: cp_model.CpSolver) -> Order:
        """The runs that a solution means, by event."""
        events = []
        for op, (starts, active) in enumerate(zip(self.starts, self.active, strict=True)):
            for start, literal in zip(starts, active, strict=True):
                if literal is True or solver.boolean_value(literal):
                    events.append((solver.value(start), op))
        return tuple(op for _, op in sorted(events))

    def hint(self, schedule: Sequence[int]) -> None:
        """Hint at the runs of a schedule."""
        stages: list[list[int]] = [[] for _ in self.starts]
        stage = 0
        for op in schedule:
            if op == stage:
                stage += 1
            elif stage < len(self.starts) and stage not in stages[op]:
                stages[op].append(stage)
        for op, again in enumerate(stages):
            for rank in range(1, len(self.starts[op])):
                literal, start = self.active[op][rank], self.starts[op][rank]
                self.model.add_hint(literal, rank <= len(again))
                if rank <= len(again):
                    self.model.add_hint(start, _event(again[rank - 1], op))
