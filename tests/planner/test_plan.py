"""Plans within budgets: what they promise, and what they say when it cannot be had."""

import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner._graph_capture.training_graph import OptimizerMemory
from planner.arguments.budget import parse_budget
from planner.search.planning import Effort, plan_within
from tests.support.graphs import HandMadeStep, chain, prepared, steps


@pytest.fixture(scope="module")
def step():
    return prepared(HandMadeStep(chain(12), 2600))


@settings(max_examples=30, deadline=None)
@given(steps(), st.integers(0, 6000))
def test_a_plan_keeps_its_budget_or_names_one_that_works(step, budget_bytes):
    ready = prepared(step)
    try:
        plan = plan_within(ready, budget_bytes, Effort(time_limit=2.0))
    except planner.InfeasibleBudget as refusal:
        assert refusal.budget_bytes == budget_bytes < refusal.minimum_bytes
        plan = plan_within(ready, refusal.minimum_bytes, Effort(time_limit=2.0))
        assert plan.peak_bytes <= refusal.minimum_bytes
    else:
        assert plan.peak_bytes <= budget_bytes
    assert 0 <= plan.overhead_bound <= plan.overhead
    assert plan.memory.total_bytes == plan.peak_bytes
    assert plan.recompute_flops == sum(row.flops * row.recomputations for row in plan.decisions)
    assert plan.overhead > 0 or all(
        row.action == "keep" or ready.base.graph.ops[ready.base.graph.index_of[row.op]].seconds == 0
        for row in plan.decisions)


def test_without_a_budget_nothing_is_recomputed(step):
    plan = plan_within(step, None)
    assert plan.budget_bytes is None
    assert plan.overhead == plan.overhead_bound == plan.recompute_flops == 0
    assert plan.status == "optimal"
    assert all(row.action == "keep" for row in plan.decisions)


def test_overhead_does_not_rise_with_the_budget():
    step = prepared(HandMadeStep(chain(8), 2600))
    overheads = [plan_within(step, budget, Effort(time_limit=5.0)).overhead
                 for budget in range(1500, 2101, 100)]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[0] > 0 and overheads[-1] == 0


def test_a_percentage_is_of_the_baseline():
    ready = prepared(HandMadeStep(chain(12), 2600))
    plan = plan_within(ready, parse_budget(budget="80%").resolve(ready.plain_bytes))
    assert plan.budget_bytes == 2080
    assert plan.peak_bytes <= 2080 < 2410


def test_an_impossible_budget_names_the_smallest_and_what_holds_it(step):
    with pytest.raises(planner.InfeasibleBudget) as caught:
        plan_within(step, 1200)
    refusal = caught.value
    assert isinstance(refusal, planner.PlannerError) and isinstance(refusal, ValueError)
    assert refusal.budget_bytes == 1200
    assert plan_within(step, refusal.minimum_bytes).peak_bytes <= refusal.minimum_bytes
    assert "net.layers." in refusal.bottleneck and "parameters" in refusal.bottleneck
    assert "net.py:1" in refusal.bottleneck
    assert f"{refusal.minimum_bytes:,}" in str(refusal) and "1,200" in str(refusal)
    assert vars(pickle.loads(pickle.dumps(refusal))) == vars(refusal)


def test_a_budget_under_the_optimizers_step_is_impossible_too():
    heavy = prepared(HandMadeStep(chain(6), 3000, OptimizerMemory("adamw", 80, 5000)))
    with pytest.raises(planner.InfeasibleBudget) as caught:
        plan_within(heavy, 4000)
    assert caught.value.minimum_bytes == 1110 + 80 + 42 + 5000
    assert "step of adamw" in caught.value.bottleneck
    assert plan_within(heavy, caught.value.minimum_bytes).overhead == 0


def test_a_solver_of_its_own_name_is_used(step):
    assert plan_within(step, 2300, Effort(solver="ilp")).solver == "ilp"


def test_a_plan_is_immutable_and_picklable(step):
    plan = plan_within(step, 1900)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.budget_bytes = 1
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(dataclasses.replace(plan, solve_seconds=99.0))


def test_errors_share_one_base():
    for kind in (planner.InfeasibleBudget, planner.CaptureError, planner.PlanMismatch,
                 planner.PlanFileError):
        assert issubclass(kind, planner.PlannerError)
    assert issubclass(planner.PlanFileError, ValueError)


def test_what_lower_rooms_raise_is_what_users_catch():
    from planner._apply.errors import PlanMismatch
    from planner._graph_capture.errors import CaptureError

    assert planner.CaptureError is CaptureError and planner.PlanMismatch is PlanMismatch
    for error in (CaptureError("why"), PlanMismatch("why")):
        assert repr(pickle.loads(pickle.dumps(error))) == repr(error)
