"""Closed forms on chains, where what the segmentations can do is known."""

from __future__ import annotations

import math

import pytest

from planner.solvers import InfeasibleBudget, simulate, solve
from tests.support.oracles import training_chain


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("length", [4, 16, 49, 100])
def test_square_root_memory_for_one_more_forward(length: int, segments: bool) -> None:
    problem = training_chain(length, segments=segments)
    budget = 2 * math.isqrt(length) + 3
    for solver in ("sqrt_n", "dp"):
        result = solve(problem, budget, solver=solver)
        assert result.peak_bytes <= budget
        assert result.cost - problem.keep_all_cost <= length


@pytest.mark.parametrize("solver", ["dp", "ilp", "auto"])
def test_each_value_that_must_go_costs_one_run(solver: str) -> None:
    # With every second value retained, dropping one costs the one run that brings it back.
    problem = training_chain(20)
    plain, _ = simulate(problem, problem.keep_all_schedule)
    for missing in range(1, 8):
        result = solve(problem, plain - missing, solver=solver, time_limit=5.0)
        extra = result.cost - problem.keep_all_cost
        assert extra >= missing
        if solver != "dp":
            assert extra == missing
            assert result.status == "optimal"


def test_what_the_square_root_cannot_do_it_says() -> None:
    problem = training_chain(64)
    with pytest.raises(InfeasibleBudget) as caught:
        solve(problem, 8, solver="sqrt_n")
    minimum = caught.value.minimum_bytes
    assert minimum <= 2 * math.isqrt(64) + 3
    assert solve(problem, minimum, solver="sqrt_n").peak_bytes == minimum
    assert solve(problem, 8, time_limit=3.0).peak_bytes <= 8
