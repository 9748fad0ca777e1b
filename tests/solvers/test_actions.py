"""Actions: runs are the numbers of their ops, and what is no known action is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from planner.solvers import IllegalSchedule, Proposal, Run, Task, simulate, solve
from planner.solvers.actions import as_order, as_schedule
from tests.support.problems import training_chain


def test_a_schedule_of_runs_is_a_sequence_of_numbers() -> None:
    order = (0, 1, 0, 2)
    schedule = as_schedule(order)
    assert all(type(action) is Run for action in schedule)
    assert schedule == order and hash(schedule) == hash(order)
    assert schedule[2] == 0 and list(schedule) == [0, 1, 0, 2]
    assert as_order(schedule) == order and all(type(op) is int for op in as_order(schedule))
    assert pickle.loads(pickle.dumps(schedule)) == schedule


def test_numbers_of_any_kind_stand_for_runs() -> None:
    problem = training_chain(3)
    plain = simulate(problem, range(len(problem)))
    assert simulate(problem, list(np.arange(len(problem)))) == plain
    assert simulate(problem, as_schedule(range(len(problem)))) == plain


@pytest.mark.parametrize("stranger", ["offload 1", 1.0, None, ("offload", 1)])
def test_the_simulator_refuses_an_action_that_it_does_not_know(stranger: object) -> None:
    problem = training_chain(3)
    schedule = (0, stranger, *range(1, len(problem)))
    with pytest.raises(IllegalSchedule, match=r"position 1 holds .* no known action"):
        simulate(problem, schedule)  # type: ignore[arg-type]
    with pytest.raises(IllegalSchedule, match="no known action"):
        solve(problem, warm_start=schedule)  # type: ignore[arg-type]


def test_a_solver_returns_typed_actions_and_starts_from_them() -> None:
    problem = training_chain(4)
    first = solve(problem, 40, time_limit=5.0)
    assert len(first.schedule) > len(problem)
    assert all(type(action) is Run for action in first.schedule)
    assert solve(problem, 40, time_limit=5.0, warm_start=first.schedule).cost == first.cost


def test_any_function_from_a_task_to_a_proposal_is_a_solver() -> None:
    def twice(task: Task) -> Proposal:
        assert task.budget_bytes == simulate(task.problem, range(len(task.problem))).peak_bytes
        return Proposal((0, 0, *range(1, len(task.problem))))

    problem = training_chain(3)
    result = solve(problem, solver=twice)
    assert result.solver == "twice" and result.schedule[:2] == (0, 0)
    assert result.cost == problem.keep_all_cost + problem.ops[0].cost
