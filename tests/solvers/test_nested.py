"""Checkpoints with eviction between them, against lazy walks alone and against the simulator."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.solvers import Problem, simulate
from planner.solvers.incremental import drop_recomputes
from planner.solvers.lazy import EvictionHeuristic, counted_walk, lazy_schedule
from planner.solvers.nested import nested
from planner.solvers.task import Task
from tests.support import strategies_small
from tests.support.oracles import training_chain


def _nested(problem: Problem, budget_bytes: int):
    proposal = nested(Task(problem, budget_bytes, time.monotonic() + 60))
    return simulate(problem, proposal.schedule)


@pytest.mark.parametrize("length", [100, 400])
def test_deep_chains_cost_less_than_by_lazy_walks_alone(length: int) -> None:
    problem = training_chain(length)
    budget = math.isqrt(length)
    peak, cost = _nested(problem, budget)
    lazy = drop_recomputes(problem, budget, lazy_schedule(problem, budget))
    assert peak <= budget
    assert cost < simulate(problem, lazy).cost


@given(problem=strategies_small.problems(), share=st.floats(0.3, 1.0))
def test_schedules_are_legal_and_checkpoints_stay(problem: Problem, share: float) -> None:
    peak = simulate(problem, problem.keep_all_schedule).peak_bytes
    budget = int(share * peak)
    found, cost = _nested(problem, budget)
    assert found <= budget or cost == problem.keep_all_cost
    everything = range(len(problem.storages))
    walk, _ = counted_walk(problem, budget, EvictionHeuristic(), 1000, checkpoints=everything)
    assert walk is None or walk == problem.keep_all_schedule
