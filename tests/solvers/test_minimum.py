"""The smallest peak: the bound and the schedule against exact answers."""

from __future__ import annotations

import time
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers.lazy import EvictionHeuristic, counted_walk
from planner.solvers.minimum import minimum_peak, working_set_floor
from planner.solvers.problem import Op, Problem, Segment, Storage
from planner.solvers.simulator import simulate
from tests.support.oracle_small import cheapest, smallest_peak
from tests.support.problems import training_chain, without_replay_state
from tests.support.strategies_small import problems, schedules


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_floor_is_below_every_schedule(data: st.DataObject) -> None:
    problem = data.draw(problems())
    peak = simulate(problem, data.draw(schedules(problem))).peak_bytes
    assert working_set_floor(problem) <= peak


@settings(max_examples=60, deadline=None)
@given(problems(max_ops=6).map(without_replay_state))
def test_floor_and_schedule_enclose_the_exact_minimum(problem: Problem) -> None:
    exact = smallest_peak(problem)
    found = simulate(problem, minimum_peak(problem)).peak_bytes
    assert working_set_floor(problem) <= exact <= found


@settings(max_examples=80, deadline=None)
@given(problem=problems(), share=st.floats(0.3, 1.0), cost=st.sampled_from([0.0, 0.4, 1.0]))
def test_a_lazy_schedule_is_legal(problem: Problem, share: float, cost: float) -> None:
    budget = int(share * simulate(problem, problem.keep_all_schedule).peak_bytes)
    found, _ = counted_walk(problem, budget, EvictionHeuristic(cost=cost), 12 * len(problem))
    if found is not None:
        peak = simulate(problem, found).peak_bytes
        assert peak <= budget or any(op.replay_state_bytes for op in problem.ops)


@settings(max_examples=60, deadline=None)
@given(problems(max_ops=6).map(without_replay_state))
def test_the_oracle_agrees_with_the_plain_schedule(problem: Problem) -> None:
    peak, cost = simulate(problem, problem.keep_all_schedule)
    assert cheapest(problem, peak) == cost


def test_a_training_chain_reaches_its_floor() -> None:
    problem = training_chain(12)
    assert working_set_floor(problem) == 30
    found = minimum_peak(problem)
    assert (
        simulate(problem, found).peak_bytes <= 40
    )  # gradient, activation, and one being recomputed


def test_a_storage_that_cannot_come_back_in_time_counts() -> None:
    ops = (Op("a", 1.0, (), (0,)), Op("b", 1.0, (), (1,)), Op("c", 1.0, (0, 1), (2,)))
    storages = (Storage(5, 0), Storage(7, 1), Storage(1, 2))
    assert working_set_floor(Problem(ops, storages)) == 13
    frozen = tuple(replace(op, workspace_bytes=3 * (op.name == "b")) for op in ops)
    assert working_set_floor(Problem(frozen, storages)) == 13
    never = (Segment(0, ()),)
    assert working_set_floor(Problem(frozen, storages, never)) == 15


def test_in_place_lowers_the_floor_and_the_found_peak() -> None:
    ops = (Op("a", 1.0, (), (0,)), Op("relu", 1.0, (0,), (1,), inplace=(0,)),
           Op("b", 1.0, (1,), (2,)))
    problem = Problem(ops, (Storage(8, 0), Storage(8, 1), Storage(1, 2)))
    assert working_set_floor(problem) == 9
    assert simulate(problem, minimum_peak(problem)).peak_bytes == 9


def test_a_long_chain_takes_seconds() -> None:
    problem = training_chain(600)
    start = time.process_time()
    found = minimum_peak(problem)
    assert time.process_time() - start < 15.0
    assert simulate(problem, found).peak_bytes < 0.1 * simulate(
        problem, problem.keep_all_schedule).peak_bytes


def test_the_same_seed_gives_the_same_schedule() -> None:
    problem = training_chain(8)
    assert minimum_peak(problem, seed=3) == minimum_peak(problem, seed=3)
