"""Schedules that treat more of the repeated blocks alike."""

import random

import pytest

from planner.api import capture
from planner.search.saving import saved_buffers, schedule_saving
from planner.search.unified_blocks import unify_blocks
from solvers.simulator import simulate
from tests.support.models import language_model


@pytest.fixture(scope="module")
def step():
    case = language_model(layers=4)
    return capture(case.model, case.inputs, loss_fn=case.loss_fn, regions="blocks")


def ways(step, schedule):
    """In how many ways the blocks save."""
    graph = step.base.graph
    saved = saved_buffers(step.base, schedule)
    return len({tuple(position for position, index in enumerate(region.forward)
                      if not saved.isdisjoint(graph.ops[index].outputs))
                for region in graph.regions})


def uneven(step, seed):
    """A schedule that saves something else in each block."""
    rng = random.Random(seed)
    saved = saved_buffers(step.base, step.base.problem.keep_all_schedule)
    return schedule_saving(step.base, {b for b in sorted(saved) if rng.random() < 0.7})


def test_without_limits_all_blocks_are_treated_alike(step):
    schedule = uneven(step, 0)
    assert ways(step, schedule) == 4
    alike = unify_blocks(step.base, schedule, net_peak_bytes=10**12, cost=float("inf"))
    assert ways(step, alike) == 1


@pytest.mark.parametrize("seed", range(4))
def test_limits_of_memory_and_cost_hold(step, seed):
    schedule = uneven(step, seed)
    before = simulate(step.base.problem, schedule)
    cost = before.cost + 0.01 * step.base.problem.keep_all_cost
    simpler = unify_blocks(step.base, schedule, net_peak_bytes=before.peak_bytes, cost=cost)
    after = simulate(step.base.problem, simpler)
    assert after.peak_bytes <= before.peak_bytes
    assert after.cost <= cost
    assert ways(step, simpler) <= ways(step, schedule)
    assert unify_blocks(step.base, schedule, net_peak_bytes=0, cost=cost) == schedule
