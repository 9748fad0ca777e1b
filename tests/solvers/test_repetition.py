"""Repeated layers: found by structure, counted in one model, with bounds that hold all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.math_opt.python import mathopt

from planner.solvers import Op, Problem, Segment, Storage, simulate, unroll
from planner.solvers.cut_model import CutModel
from planner.solvers.milp import optimise
from planner.solvers.repetition import LEAST_SPARED, runs_of
from tests.support.oracle_small import cheapest
from tests.support.problems import all_runs, repeated
from tests.support.strategies_small import schedules
from tests.support.synthetic_gpt import gpt

SECONDS = 60.0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_bound_on_counts_holds_for_every_schedule(data: st.DataObject) -> None:
    problem = data.draw(repeated())
    peak, cost = simulate(problem, data.draw(schedules(problem)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(problem) - 1), min_size=1, max_size=3)))
    solution = CutModel(problem, peak, tuple(cuts), runs=all_runs(problem)).solve(SECONDS)
    assert solution.solved
    assert problem.keep_all_cost + solution.extra_bound <= cost + 1e-6


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_counting_never_says_more_than_telling_apart(data: st.DataObject) -> None:
    problem = data.draw(repeated(times=2))
    plain, _ = simulate(problem, problem.keep_all_schedule)
    budget = data.draw(st.integers(plain // 2, plain))
    cuts = tuple(sorted(data.draw(st.sets(
        st.integers(0, len(problem) - 1), min_size=1, max_size=2))))
    counted = CutModel(problem, budget, cuts, runs=all_runs(problem)).solve(SECONDS)
    apart = CutModel(problem, budget, cuts).solve(SECONDS)
    assert counted.extra_bound <= apart.extra_bound + 1e-6
    best = cheapest(problem, budget) if len(problem) <= 9 else None
    if best is not None:
        assert problem.keep_all_cost + apart.extra_bound <= best + 1e-6


def _by_layers(problem: Problem) -> Problem:
    """The same step, each layer's forward a segment of its own that the backward may replay."""
    (run,), (_, *others) = runs_of(problem), problem.segments
    starts = [0, *range(run.start + run.period, run.stop, run.period)]
    layers = range(len(starts))
    return replace(problem, segments=(
        *(Segment(start, (number,)) for number, start in enumerate(starts)),
        *(Segment(each.start, tuple(layers) if 0 in each.replays else ()) for each in others)))


@pytest.mark.parametrize("fraction", [0.7, 0.5, 0.35])
@pytest.mark.parametrize("layers", [4, 7])
@pytest.mark.parametrize("is_by_layers", [False, True])
def test_with_one_cut_nothing_is_lost_by_counting(layers: int, fraction: float,
                                                  is_by_layers: bool) -> None:
    problem = gpt(layers)
    if is_by_layers:
        whole, problem = problem, _by_layers(problem)
        assert max(run.spared for run in runs_of(problem)) == max(
            run.spared for run in runs_of(whole))
    timeline = unroll(problem, problem.keep_all_schedule)
    budget = int(fraction * timeline.peak_bytes)
    runs = runs_of(problem)
    assert runs
    models = [CutModel(problem, budget, (timeline.peak_position,), runs=r) for r in ((), runs)]
    apart, counted = (model.solve(SECONDS) for model in models)
    assert apart.solved and counted.solved
    costs = [model.cost_unit * mathopt.evaluate_expression(
        model.mip.objective.as_linear_expression(), optimise(model.mip, SECONDS).values)
             for model in models]
    assert costs[1] == pytest.approx(costs[0], rel=1e-6)
    assert counted.extra_bound == pytest.approx(apart.extra_bound, rel=1e-6)
    for solution in (apart, counted):
        held = sum(problem.storages[s].size_bytes for s in solution.retained[0])
        assert held <= budget


def test_the_model_does_not_grow_with_depth() -> None:
    sizes = []
    for layers in (12, 48):
        problem = gpt(layers)
        timeline = unroll(problem, problem.keep_all_schedule)
        model = CutModel(problem, timeline.peak_bytes // 2, (timeline.peak_position,),
                         runs=runs_of(problem))
        sizes.append(model.mip.get_num_variables())
    assert sizes[0] == sizes[1] < 200


def test_layers_are_found_by_their_structure() -> None:
    problem = gpt(12)
    (run, *_) = runs_of(problem)
    # Every second layer keeps its first mask, so the stretch that repeats is two layers.
    assert (run.stop - run.start) // run.period >= 6
    names = [op.name.removeprefix("h0").removeprefix("h2") for op in problem.ops]
    assert names[run.start:run.start + 16] == names[
        run.start + run.period:run.start + run.period + 16]


def test_what_differs_in_size_or_cost_is_no_repetition() -> None:
    ops = tuple(Op("op", float(i), (i - 1,) if i else (), (i,)) for i in range(40))
    storages = tuple(Storage(7, i) for i in range(40))
    assert runs_of(Problem(ops, storages)) == ()
    alike = tuple(Op("op", 1.0, (i - 1,) if i else (), (i,)) for i in range(40))
    (run,) = runs_of(Problem(alike, storages))
    assert run.period == 1 and run.stop - run.start - run.period >= LEAST_SPARED
