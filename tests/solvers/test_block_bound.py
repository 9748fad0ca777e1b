"""The bound that looks at each layer by itself: it holds for every schedule."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers import Problem, simulate, unroll
from planner.solvers.block_bound import BlockBound, layers_of
from planner.solvers.repetition import runs_of
from planner.solvers.task import Task
from tests.support.oracle_small import cheapest
from tests.support.problems import all_runs, repeated
from tests.support.strategies_small import schedules
from tests.support.synthetic_gpt import gpt


def bound(problem: Problem, budget: int, price: float) -> float:
    pivot = unroll(problem, problem.keep_all_schedule).peak_position
    task = Task(problem, budget, time.monotonic() + 10.0)
    return BlockBound(task, all_runs(problem), pivot).best(price)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_is_below_every_schedule(data: st.DataObject) -> None:
    problem = data.draw(repeated())
    peak, cost = simulate(problem, data.draw(schedules(problem)))
    price = data.draw(st.floats(0.0, 3.0))
    assert problem.keep_all_cost + bound(problem, peak, price) <= cost + 1e-6


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_it_is_below_the_optimum(data: st.DataObject) -> None:
    problem = data.draw(repeated(times=2).filter(lambda p: len(p) <= 9))
    plain, _ = simulate(problem, problem.keep_all_schedule)
    budget = data.draw(st.integers(plain // 2, plain))
    best = cheapest(problem, budget)
    if best is not None:
        price = data.draw(st.floats(0.0, 3.0))
        assert problem.keep_all_cost + bound(problem, budget, price) <= best + 1e-6


def test_layers_that_are_alike_are_one_problem() -> None:
    problem = gpt(12)
    pivot = unroll(problem, problem.keep_all_schedule).peak_position
    layers = layers_of(problem, runs_of(problem), pivot)
    assert len(layers) >= 6
    assert len({layer.problem for layer in layers}) <= 3
    covered = sum(layer.pivot for layer in layers)
    assert covered >= 0.9 * sum(op.recomputable for op in problem.ops)
