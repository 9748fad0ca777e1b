"""Checkmate: the full rematerialization MILP of Jain et al. (MLSys 2020, arXiv:1910.02653).

Stage t ends with the first run of op t.  R[t,k]: op k runs in stage t; S[t,s]: storage s is held
from stage t-1 into stage t; U[t,k]: memory at the run of k in stage t; FREE[t,s,k]: s is released
right after that run, which takes that nothing later in the stage reads it and S[t+1,s] = 0.
The number of variables grows with ops times (ops + edges): fit for a hundred ops.

Class of schedules: an op runs at most once per stage, and a stage's runs come in the order of the
ops.  Memory is modelled from the safe side: nothing is taken over in place, an op that is
recomputed holds its replay state to the end, and a second instance of an op's outputs counts beside
the first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ortools.math_opt.python import mathopt

from solvers.milp import Engine, optimise
from solvers.problem import Order, Problem
from solvers.simulator import simulate
from solvers.task import Proposal, Task

_BUDGET_UNITS = 1000.0  # the budget in the model's unit of memory, for the sake of its numerics


def checkmate(task: Task) -> Proposal:
    """The best schedule that the full MILP gives in time, with the bound of keeping everything.

    The MILP starts from the recomputations per stage of the warm start.
    """
    problem = task.problem
    nothing = Proposal(problem.keep_all_schedule, problem.keep_all_cost)
    program = _Program(problem, task.budget_bytes, task.deadline)
    if program.late:
        return nothing
    hint = None if task.warm_start is None else program.values_of(task.warm_start)
    answer = optimise(program.mip, task.deadline - time.monotonic(), engine=Engine.HIGHS,
                      seed=task.seed, hint=hint)
    bound = problem.keep_all_cost + answer.bound * program.cost_unit
    task.report(f"checkmate: no schedule of its class costs less than {bound:.6g}")
    if answer.values is None:
        return nothing
    schedule = program.schedule(answer.values)
    if simulate(problem, schedule).peak_bytes > task.budget_bytes:  # by the engine's tolerance
        return nothing
    return Proposal(schedule, problem.keep_all_cost)


class _Program:
    """The MILP of one problem and its budget."""

    def __init__(self, problem: Problem, budget_bytes: int, deadline: float) -> None:
        self.problem = problem
        self.mip = mathopt.Model()
        self.unit = max(budget_bytes, 1) / _BUDGET_UNITS
        self.budget = budget_bytes / self.unit
        self.cost_unit = max((op.cost for op in problem.ops), default=0.0) / 1000.0 or 1.0
        count = len(problem)
        self.sizes = [storage.size_bytes / self.unit for storage in problem.storages]
        replayable = [[op for op in range(t) if problem.may_replay(op, t)] for t in range(count)]
        self.again = [{op: self.mip.add_binary_variable() for op in ops} for ops in replayable]
        self.held: list[dict[int, mathopt.Variable]] = [
            {index: self.mip.add_binary_variable()
             for index, storage in enumerate(problem.storages)
             if storage.producer < t and not storage.kept_to_end}
            for t in range(count)]
        self.freed: list[dict[tuple[int, int], mathopt.Variable]] = [{} for _ in range(count)]
        self.replayed = {op: self.mip.add_binary_variable()
                         for op in sorted({op for ops in replayable for op in ops})
                         if problem.ops[op].replay_state_bytes}
        self.late = False
        for t in range(count):
            self._correctness(t)
            self._memory(t)
            if time.monotonic() > deadline:
                self.late = True
                return
        self.mip.minimize(mathopt.LinearSum(
            problem.ops[op].cost / self.cost_unit * variable
            for stage in self.again for op, variable in stage.items()))

    def _runs(self, t: int) -> list[tuple[int, mathopt.Variable | float]]:
        """Ops that may run in a stage, in order, each with its R."""
        return [*self.again[t].items(), (t, 1.0)]

    def _correctness(self, t: int) -> None:
        problem = self.problem
        for op, running in self._runs(t):
            for storage in problem.ops[op].inputs:
                if storage in self.held[t]:
                    made = self.again[t].get(problem.storages[storage].producer, 0.0)
                    self.mip.add_linear_constraint(running <= self.held[t][storage] + made)
        for op, running in self.again[t].items():
            if op in self.replayed:
                self.mip.add_linear_constraint(running <= self.replayed[op])
        if t:
            for storage, holding in self.held[t].items():
                producer = problem.storages[storage].producer
                if producer < t - 1:
                    made = self.again[t - 1].get(producer, 0.0)
                    self.mip.add_linear_constraint(holding <= self.held[t - 1][storage] + made)

    def _memory(self, t: int) -> None:
        problem, sizes = self.problem, self.sizes
        kept = sum(size for size, storage in zip(sizes, problem.storages, strict=True)
                   if storage.kept_to_end and storage.producer < t)
        used: mathopt.LinearTypes = kept + mathopt.LinearSum(
            [sizes[s] * variable for s, variable in self.held[t].items()]
            + [problem.ops[op].replay_state_bytes / self.unit * variable
               for op, variable in self.replayed.items() if op <= t])
        for op, running in self._runs(t):
            described = problem.ops[op]
            # A recomputed instance of a storage kept to the end lives only while its op runs.
            passing = sum(sizes[s] for s in described.outputs
                          if op < t and problem.storages[s].kept_to_end)
            made = sum(sizes[s] for s in described.outputs) - passing
            level = self.mip.add_variable(lb=0.0, ub=self.budget)
            self.mip.add_linear_constraint(level == used + made * running)
            extra = described.workspace_bytes / self.unit + passing
            if extra:
                self.mip.add_linear_constraint(level + extra * running <= self.budget)
            released = []
            for storage in (*described.inputs, *described.outputs):
                if not problem.storages[storage].kept_to_end and sizes[storage]:
                    variable = self.mip.add_binary_variable()
                    self.freed[t][storage, op] = variable
                    hazards = self._hazards(t, storage, op, running)
                    self.mip.add_linear_constraint(1 - variable <= mathopt.LinearSum(hazards))
                    self.mip.add_linear_constraint(
                        len(hazards) * (1 - variable) >= mathopt.LinearSum(hazards))
                    released.append(sizes[storage] * variable)
            used = level - mathopt.LinearSum(released)

    def _hazards(self, t: int, storage: int, op: int,
                 running: mathopt.Variable | float) -> list[mathopt.LinearTypes]:
        """What forbids releasing a storage after the run of `op` in stage t: terms of 0 or 1."""
        hazards: list[mathopt.LinearTypes] = [1 - running]
        if t + 1 < len(self.problem):
            hazards.append(self.held[t + 1][storage])
        for reader in self.problem.consumers[storage]:
            if op < reader < t and reader in self.again[t]:
                hazards.append(self.again[t][reader])
            elif reader == t and op < t:
                hazards.append(1.0)
        return hazards

    def schedule(self, values: Mapping[mathopt.Variable, float]) -> Order:
        """The runs that a solution means."""
        return tuple(op for t in range(len(self.problem)) for op in (
            *(op for op, variable in self.again[t].items() if values[variable] > 0.5), t))

    def values_of(self, schedule: Sequence[int]) -> dict[mathopt.Variable, float]:
        """R and S of a schedule, its runs within a stage put in the order of the ops."""
        problem, count = self.problem, len(self.problem)
        stages: list[set[int]] = []
        current: set[int] = set()
        for op in schedule:
            if op == len(stages):
                stages.append(current)
                current = set()
            else:
                current.add(op)
        values = {}
        needed: set[int] = set()
        for t in range(count - 1, -1, -1):
            runs = {op for op in stages[t] if op in self.again[t]}
            for op in sorted({*runs, t}, reverse=True):
                needed.difference_update(problem.ops[op].outputs)
                needed.update(problem.ops[op].inputs)
            for op, variable in self.again[t].items():
                values[variable] = float(op in runs)
            for storage, variable in self.held[t].items():
                values[variable] = float(storage in needed)
        return values
