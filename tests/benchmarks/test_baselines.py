"""The published methods: legal, within the budget, optimal on tiny problems of their class."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines import checkmate, moccasin
from solvers.problem import Order, Problem
from solvers.simulator import simulate
from solvers.task import Algorithm, Progress, Task
from tests.support.oracle_small import cheapest
from tests.support.problems import training_chain, without_replay_state
from tests.support.strategies_small import problems

BASELINES = [checkmate, moccasin]


def run(baseline: Algorithm, problem: Problem, budget: int, *, seconds: float = 60.0,
        seed: int = 0, warm_start: Order | None = None,
        progress: Progress | None = None) -> tuple[Order | None, float]:
    """What a method found, if anything, and its bound."""
    found = baseline(Task(problem, budget, time.monotonic() + seconds, seed, warm_start,
                          progress=progress))
    nothing = (found.schedule == problem.keep_all_schedule
               and simulate(problem, found.schedule).peak_bytes > budget)
    return None if nothing else found.schedule, found.lower_bound


@pytest.mark.parametrize("baseline", BASELINES)
@settings(max_examples=25, deadline=None)
@given(problem=problems(max_ops=6), share=st.floats(0.3, 1.0))
def test_what_comes_back_is_legal_and_within_the_budget(
        baseline: Algorithm, problem: Problem, share: float) -> None:
    budget = int(share * simulate(problem, problem.keep_all_schedule).peak_bytes)
    found, bound = run(baseline, problem, budget, seconds=20.0)
    assert bound <= problem.keep_all_cost
    if found is None:
        return
    peak, cost = simulate(problem, found)
    assert peak <= budget
    if not any(op.replay_state_bytes for op in problem.ops):
        best = cheapest(problem, budget)
        assert best is not None
        assert cost >= best - 1e-9


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("budget", [60, 50, 40])
def test_a_chain_is_solved_to_optimality(baseline: Algorithm, budget: int) -> None:
    problem = training_chain(4)
    best = cheapest(problem, budget)
    found, _ = run(baseline, problem, budget)
    assert (found is None) == (best is None)
    if found is not None:
        assert simulate(problem, found).cost == best


def test_two_intervals_are_too_few_where_an_op_must_run_three_times() -> None:
    problem = training_chain(4)
    assert run(moccasin, problem, 30)[0] is None
    found, _ = run(checkmate, problem, 30)
    assert found is not None
    assert simulate(problem, found).cost == cheapest(problem, 30)


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_warm_start_and_progress_are_taken(baseline: Algorithm) -> None:
    problem = training_chain(4)
    first, _ = run(baseline, problem, 50)
    lines: list[str] = []
    second, _ = run(baseline, problem, 50, seed=1, progress=lines.append, warm_start=first)
    assert simulate(problem, second).cost == simulate(problem, first).cost
    assert any("costs less" in line for line in lines)


@pytest.mark.parametrize("baseline", BASELINES)
@settings(max_examples=15, deadline=None)
@given(problem=problems(max_ops=5).map(without_replay_state))
def test_a_budget_of_the_plain_peak_costs_nothing(
        baseline: Algorithm, problem: Problem) -> None:
    plain = Problem(tuple(op for op in problem.ops), problem.storages, problem.segments)
    total = sum(s.size_bytes for s in plain.storages) + sum(o.workspace_bytes for o in plain.ops)
    found, _ = run(baseline, plain, total)
    assert found is not None
    assert simulate(plain, found).cost == plain.keep_all_cost
