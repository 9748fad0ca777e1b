"""The same answer whatever the load of the machine, wherever the proof closes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from solvers import Problem, simulate, solve
from solvers.result import Result
from tests.joint_graphs import gpt
from tests.oracles import training_chain

SLOWER = 4.0
"""How many times slower the loaded machine is."""


def solve_under_load(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Result]) -> Result:
    """The answer on a machine on which every second of the clock does a fraction of the work."""
    real = time.monotonic
    begin = real()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: begin + SLOWER * (real() - begin))
        return answer()


@pytest.mark.parametrize(("problem", "fraction"), [
    (gpt(2), 0.7), (gpt(3), 0.5), (gpt(4, dropout=False), 0.45), (training_chain(12), 0.55),
    (training_chain(16, segments=False), 0.5)])
def test_a_proven_schedule_does_not_depend_on_the_load(
        problem: Problem, fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = simulate(problem, problem.plain_schedule)
    budget = int(plain * fraction)
    calm = solve(problem, budget, time_limit=30.0)
    loaded = solve_under_load(monkeypatch, lambda: solve(problem, budget, time_limit=30.0))
    assert calm.status == loaded.status == "optimal"
    assert calm.schedule == loaded.schedule


def test_a_time_limit_returns_what_was_found_and_what_is_not_proven() -> None:
    problem = gpt(6)
    plain, _ = simulate(problem, problem.plain_schedule)
    result = solve(problem, int(plain * 0.25), time_limit=0.2)
    assert result.peak_bytes <= int(plain * 0.25)
    assert result.status == "feasible" and result.gap > 0
