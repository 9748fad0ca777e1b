"""Local search: never worse, always within the budget, optimal on tiny problems."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.solvers.local_search import descend, improve
from planner.solvers.minimum import minimum_peak
from planner.solvers.problem import Order, Problem
from planner.solvers.simulator import simulate
from tests.support.oracle_small import cheapest
from tests.support.problems import training_chain, without_replay_state
from tests.support.strategies_small import problems, schedules


def within(problem: Problem, budget: int) -> Order | None:
    """A schedule within the budget, at any cost."""
    found = minimum_peak(problem, target_bytes=budget)
    return found if simulate(problem, found).peak_bytes <= budget else None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_improvement_stays_legal_within_budget_and_is_never_worse(data: st.DataObject) -> None:
    problem = data.draw(problems())
    start = data.draw(schedules(problem))
    before = simulate(problem, start)
    seed = data.draw(st.integers(0, 9))
    found = improve(problem, before.peak_bytes, start, moves=1000, seed=seed)
    after = simulate(problem, found)
    assert after.peak_bytes <= before.peak_bytes
    assert after.cost <= before.cost


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_ops=6).map(without_replay_state), share=st.floats(0.4, 1.0))
def test_no_schedule_is_cheaper_than_the_optimum(problem: Problem, share: float) -> None:
    budget = int(share * simulate(problem, problem.keep_all_schedule).peak_bytes)
    best = cheapest(problem, budget)
    found = within(problem, budget)
    if best is None:
        assert found is None
        return
    assume(found is not None)
    cost = simulate(problem, improve(problem, budget, found, moves=3000)).cost
    assert cost >= best - 1e-9


@pytest.mark.parametrize("budget", [35, 45, 55])
def test_a_short_chain_is_solved_to_optimality(budget: int) -> None:
    problem = training_chain(6)
    start = within(problem, budget)
    best = cheapest(problem, budget)
    assert (start is None) == (best is None)
    if start is not None:
        found = improve(problem, budget, start, moves=30_000)
        assert simulate(problem, found).cost == best


def test_a_schedule_over_the_budget_is_refused() -> None:
    problem = training_chain(4)
    with pytest.raises(ValueError, match="over the budget of 30"):
        improve(problem, 30, problem.keep_all_schedule, moves=1)


def test_moves_make_the_result_reproducible() -> None:
    problem = training_chain(10)
    start = within(problem, 70)
    assert start is not None
    runs = {improve(problem, 70, start, moves=2000, seed=5) for _ in range(2)}
    assert len(runs) == 1


@settings(max_examples=15, deadline=None)
@given(problem=problems(), seed=st.integers(0, 9))
def test_a_descent_goes_down_only(problem: Problem, seed: int) -> None:
    start = problem.keep_all_schedule
    peaks = [simulate(problem, found).peak_bytes
             for found, _ in islice(descend(problem, start, 0, seed), 20)]
    assert peaks == sorted(peaks, reverse=True)
    assert all(peak <= simulate(problem, start).peak_bytes for peak in peaks)


def test_a_descent_finds_the_way_down_a_chain() -> None:
    problem = training_chain(30)
    found = [schedule for schedule, _ in islice(descend(
        problem, problem.keep_all_schedule, 30, seed=0), 200)]
    assert simulate(problem, found[-1]).peak_bytes < 0.4 * simulate(
        problem, problem.keep_all_schedule).peak_bytes
