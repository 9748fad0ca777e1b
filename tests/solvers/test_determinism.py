"""The same answer whatever the load of the machine, wherever the proof closes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from planner.solvers import Problem, simulate, solve
from planner.solvers.incumbent import Incumbent
from planner.solvers.result import Result
from planner.solvers.task import Task
from tests.support.oracles import training_chain
from tests.support.synthetic_gpt import gpt


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, Callable[[], Result]], Result]:
    """The answer on a machine on which a second of the clock does only a fraction of the work."""
    real = time.monotonic

    def under_load(slower: float, answer: Callable[[], Result]) -> Result:
        begin = real()
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: begin + slower * (real() - begin))
            return answer()

    return under_load


CASES = [
    (gpt(2), 0.7), (gpt(3), 0.5), (gpt(4, dropout=False), 0.45), (gpt(6), 0.3),
    (training_chain(12), 0.55), (training_chain(16, segments=False), 0.5)]


@pytest.mark.parametrize(("problem", "fraction"), CASES)
def test_a_proven_schedule_does_not_depend_on_the_load(
        problem: Problem, fraction: float,
        loaded: Callable[[float, Callable[[], Result]], Result]) -> None:
    plain, _ = simulate(problem, problem.keep_all_schedule)
    budget = int(plain * fraction)
    calm = solve(problem, budget, time_limit=30.0)
    proven = 0
    # Ever slower, so that the deadline strikes in ever earlier steps of the search.
    for slower in (3.0, 30.0, 60.0, 120.0, 240.0, 1000.0):
        result = loaded(slower, lambda: solve(problem, budget, time_limit=30.0))
        assert result.peak_bytes <= budget
        if result.status == "optimal":
            proven += 1
            assert result.schedule == calm.schedule
            assert calm.status == "optimal"
    assert calm.status != "optimal" or proven


@pytest.mark.parametrize(("problem", "fraction"), CASES)
def test_work_that_is_counted_gives_one_schedule_whatever_the_load(
        problem: Problem, fraction: float,
        loaded: Callable[[float, Callable[[], Result]], Result]) -> None:
    plain, _ = simulate(problem, problem.keep_all_schedule)

    def answer() -> Result:
        return solve(problem, int(plain * fraction), time_limit=1e4, work_limit=0.5)

    calm = answer()
    assert loaded(30.0, answer).schedule == calm.schedule


def test_what_only_the_deadline_lets_through_is_not_called_optimal() -> None:
    """A schedule that turns up after the deadline may be another one next time."""
    problem = training_chain(8)
    plain, _ = simulate(problem, problem.keep_all_schedule)
    task = Task(problem, plain // 2, time.monotonic() - 1.0)
    incumbent = Incumbent(task)
    incumbent.start()
    assert incumbent.fits and incumbent.late and incumbent.proposal().late


def test_a_time_limit_returns_what_was_found_and_what_is_not_proven() -> None:
    problem = gpt(6)
    plain, _ = simulate(problem, problem.keep_all_schedule)
    result = solve(problem, int(plain * 0.25), time_limit=0.01)
    assert result.peak_bytes <= int(plain * 0.25)
    assert result.status == "feasible" and result.gap > 0


@pytest.mark.slow
def test_counted_work_that_goes_on_from_a_schedule_leaves_out_the_simple_stages(
        monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gpt(6)
    plain, _ = simulate(problem, problem.keep_all_schedule)
    budget = int(0.2 * plain)
    before = solve(problem, int(0.198 * plain), time_limit=1e4, work_limit=0.5)
    asked: list[float | None] = []
    monkeypatch.setattr("planner.solvers.auto._offer",
                        lambda task, incumbent, stages: asked.append(task.work_limit))
    after = solve(problem, budget, time_limit=1e4, work_limit=0.5, warm_start=before.schedule)
    assert not asked
    assert after.peak_bytes <= budget and after.cost <= before.cost
    solve(problem, budget, time_limit=1e4, work_limit=0.5)
    solve(problem, budget, time_limit=1e4, work_limit=0.5, warm_start=problem.keep_all_schedule)
    assert asked == [0.5, 0.5]
