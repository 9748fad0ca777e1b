"""Every solver behind the one face: legal, within budget, bounded from below, honest in failure."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers import SOLVERS, InfeasibleBudget, Problem, milp, simulate, solve
from planner.solvers.problem import Op, Segment, Storage
from tests.support.oracle_small import cheapest
from tests.support.oracles import evaluate, training_chain
from tests.support.strategies_small import problems, schedules
from tests.support.synthetic_gpt import gpt


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_result_is_legal_within_budget_and_bounded(solver: str, data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=9))
    plain, _ = simulate(problem, problem.keep_all_schedule)
    budget = data.draw(st.integers(0, plain + 1))
    known = simulate(problem, data.draw(schedules(problem)))
    try:
        result = solve(problem, budget, solver=solver, time_limit=5.0)
    except InfeasibleBudget as error:
        assert error.budget_bytes == budget < error.minimum_bytes
        again = solve(problem, error.minimum_bytes, solver=solver, time_limit=5.0)
        assert again.peak_bytes <= error.minimum_bytes
        return
    assert evaluate(problem, result.schedule) == (result.peak_bytes, result.cost)
    assert result.peak_bytes <= budget
    assert result.lower_bound <= result.cost
    if known.peak_bytes <= budget:
        assert result.lower_bound <= known.cost
        if result.status == "optimal":
            assert result.cost <= known.cost


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_optima_and_bounds_agree_with_exhaustive_search(data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=7).filter(
        lambda p: not any(op.replay_state_bytes for op in p.ops)))
    plain, _ = simulate(problem, problem.keep_all_schedule)
    budget = data.draw(st.integers(plain // 2, plain))
    best = cheapest(problem, budget)
    try:
        result = solve(problem, budget, time_limit=5.0)
    except InfeasibleBudget:
        return  # the smallest peak is searched for, not proven
    assert best is not None
    assert result.lower_bound <= best <= result.cost
    if result.status == "optimal":
        assert result.cost == best


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_bound_is_below_every_schedule_of_any_solver(data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=6))
    plain, _ = simulate(problem, problem.keep_all_schedule)
    budget = data.draw(st.integers(plain // 2, plain))
    results = []
    for solver in SOLVERS:
        try:
            results.append(solve(problem, budget, solver=solver, time_limit=20.0))
        except InfeasibleBudget as error:
            assert error.minimum_bytes > budget
    for result in results:
        assert evaluate(problem, result.schedule) == (result.peak_bytes, result.cost)
        assert result.peak_bytes <= budget
        assert result.lower_bound <= min(other.cost for other in results) + 1e-6


def test_no_budget_means_nothing_is_recomputed() -> None:
    problem = training_chain(6)
    result = solve(problem)
    assert result.schedule == problem.keep_all_schedule
    assert result.status == "optimal"
    assert result.overhead == result.overhead_bound == result.gap == 0.0


@pytest.mark.parametrize("arguments", [
    {"solver": "magic"}, {"budget_bytes": -1}, {"budget_bytes": 2.5}, {"budget_bytes": True},
    {"time_limit": 0.0}, {"time_limit": float("nan")}, {"warm_start": (0, 1)}])
def test_bad_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError) as caught:
        solve(training_chain(3), **arguments)
    if "solver" in arguments:
        assert all(name in str(caught.value) for name in (*SOLVERS, "magic"))


def test_a_budget_that_the_first_cut_rules_out_is_refused_by_the_ladder() -> None:
    # The working sets fit in 12 bytes, the random state held from op5 to op8 does not beside them.
    problem = Problem(
        ops=(Op("op5", 0.0, (), (0,), replay_state_bytes=2),
             Op("op6", 0.0, (), (1,), workspace_bytes=2, recomputable=False),
             Op("op7", 0.0, (), ()),
             Op("op8", 0.0, (0,), (), recomputable=False)),
        storages=(Storage(2, 0, kept_to_end=False), Storage(9, 1, kept_to_end=True)),
        segments=(Segment(0, (0,)),))
    with pytest.raises(InfeasibleBudget) as caught:
        solve(problem, 12, time_limit=2.0)
    assert caught.value.minimum_bytes == 13
    assert solve(problem, 13, time_limit=2.0).peak_bytes == 13


def test_a_larger_budget_never_costs_more_with_a_warm_start() -> None:
    problem = gpt(2)
    plain, _ = simulate(problem, problem.keep_all_schedule)
    known, costs = None, []
    for tenths in range(4, 11):
        result = solve(problem, plain * tenths // 10, time_limit=2.0, warm_start=known)
        known = result.schedule
        costs.append(result.cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == problem.keep_all_cost


def test_progress_is_reported_line_by_line() -> None:
    lines: list[str] = []
    problem = gpt(2)
    plain, _ = simulate(problem, problem.keep_all_schedule)
    solve(problem, plain // 2, time_limit=5.0, progress=lines.append)
    assert lines and all("extra time" in line and "\n" not in line for line in lines)


def test_the_same_input_and_seed_give_the_same_schedule_where_the_proof_closes() -> None:
    problem = gpt(3)
    plain, _ = simulate(problem, problem.keep_all_schedule)
    first, second = (solve(problem, int(plain * 0.7), seed=3) for _ in range(2))
    assert first.status == second.status == "optimal"
    assert first.schedule == second.schedule


@pytest.mark.parametrize("fraction", [0.8, 0.6, 0.45])
@pytest.mark.parametrize("layers", [1, 4])
def test_joint_graphs_at_every_budget(layers: int, fraction: float) -> None:
    problem: Problem = gpt(layers)
    plain, _ = simulate(problem, problem.keep_all_schedule)
    try:
        result = solve(problem, int(plain * fraction), time_limit=2.0)
    except InfeasibleBudget as error:
        result = solve(problem, error.minimum_bytes, time_limit=2.0)
    assert evaluate(problem, result.schedule) == (result.peak_bytes, pytest.approx(result.cost))
    assert layers == 1 or result.gap <= 0.03


def test_auto_is_never_worse_than_another_solver() -> None:
    problem = gpt(3)
    plain, _ = simulate(problem, problem.keep_all_schedule)
    budget = plain // 2
    best = solve(problem, budget, time_limit=5.0)
    for solver in ("sqrt_n", "dp", "ilp"):
        assert best.cost <= solve(problem, budget, solver=solver, time_limit=5.0).cost * (1 + 1e-9)


def test_an_interrupt_during_a_model_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """OR-Tools calls Python from C as it returns, where an exception is dropped."""
    def interrupted(*_: object, **__: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(milp.mathopt, "solve", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            milp.optimise(milp.mathopt.Model(), 1.0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
