"""One problem under many budgets: what one result says about the others."""

from __future__ import annotations

from dataclasses import replace

from planner.solvers import simulate, solve
from planner.solvers.curve import solve_all
from tests.support.synthetic_gpt import gpt


def test_costs_fall_with_the_budget_and_what_is_known_is_not_solved_again() -> None:
    problem = gpt(3)
    plain, _ = simulate(problem, problem.keep_all_schedule)
    budgets = [plain * tenths // 10 for tenths in (4, 6, 8, 10)]
    known = replace(solve(problem, budgets[1], time_limit=10.0), solver="known")
    lines: list[str] = []
    results = solve_all(problem, budgets, seconds=20.0, known={budgets[1]: known},
                        progress=lines.append)
    costs = [result.cost for result in results]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == problem.keep_all_cost
    assert results[1].solver == "known"
    assert [line for line in lines if line.startswith("budget")][:3] == [
        "budget 1 of 4", "budget 3 of 4", "budget 4 of 4"]
    for budget, result in zip(budgets, results, strict=True):
        assert simulate(problem, result.schedule).peak_bytes <= budget
        assert result.lower_bound <= result.cost
