"""The breakdown of the step: every byte has a category; the peak is that of the fullest moment."""

from collections import Counter
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner._apply.rewrite_spec import Insertion
from planner._graph_capture.training_graph import OptimizerMemory, Phase
from planner.plans.decisions import build_spec, schedule_of
from planner.search.planning import Effort, plan_within
from planner.solvers.simulator import simulate, unroll
from planner.step.breakdown import breakdown, holders_at, memory_over
from planner.step.categories import CATEGORIES, MemoryByCategory
from planner.step.lowering import lower
from tests.support.graphs import HandMadeStep, chain, legal_schedule, prepared, steps


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_the_categories_sum_to_the_memory_at_every_run(step, data):
    problem = lower(step.graph)
    timeline = unroll(problem, legal_schedule(data, problem))
    rows = memory_over(step.graph, timeline).values()
    assert [*map(sum, zip(*rows, strict=True))] == [*timeline.memory_bytes]
    for position, size in enumerate(timeline.memory_bytes):
        assert sum(held for _, held in holders_at(step.graph, timeline, position)) == size


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_the_peak_is_resident_memory_and_the_fuller_of_the_two_phases(step, data):
    ready = prepared(step)
    schedule = legal_schedule(data, ready.base.problem)
    made = breakdown(ready.base, unroll(ready.base.problem, schedule))
    state = 0 if step.optimizer is None else step.optimizer.state_bytes
    resident = sum(astuple(step.graph.resident)) + state
    kept = sum(b.size_bytes for b in step.graph.buffers if b.kept_to_end)
    optimizer_step = 0 if step.optimizer is None else (
        resident + kept + step.optimizer.step_peak_bytes)
    forward_backward = resident + simulate(ready.base.problem, schedule).peak_bytes
    assert ready.resident_bytes == resident
    assert made.peak_bytes == max(forward_backward, optimizer_step) == sum(made.memory.values())
    assert list(made.memory) == list(CATEGORIES)


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_a_recipe_stands_for_its_schedule(step, data):
    ready = prepared(step)
    schedule = legal_schedule(data, ready.base.problem)
    spec = build_spec(ready, ready.base, unroll(ready.base.problem, schedule))
    assert schedule_of(ready.base, spec) == schedule


def test_an_action_that_a_recipe_cannot_hold_is_refused_both_ways():
    ready = prepared(HandMadeStep(chain(4), 2000))
    variant = ready.base
    timeline = unroll(variant.problem, range(len(variant.problem)))
    strange = replace(timeline, schedule=(0, "offload 0", *timeline.schedule[1:]))
    with pytest.raises(AssertionError, match="'offload 0'"):
        build_spec(ready, variant, strange)
    spec = build_spec(ready, variant, timeline)
    region = replace(spec.regions[0],
                     insertions=(Insertion(variant.graph.ops[1].name, ("fetch 0",)),))
    with pytest.raises(AssertionError, match="'fetch 0'"):
        schedule_of(variant, replace(spec, regions=(region,)))


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_the_recipe_takes_over_what_the_simulator_says(step, data):
    graph, ready = step.graph, prepared(step)
    timeline = unroll(ready.base.problem, legal_schedule(data, ready.base.problem))
    spec = build_spec(ready, ready.base, timeline)
    said = {(reuse.op, reuse.run): reuse.candidate
            for region in spec.regions for reuse in region.inplace_reuses}
    runs = Counter()
    for index, storage in zip(timeline.schedule, timeline.inplace_of, strict=True):
        op = graph.ops[index]
        taken = said.pop((op.name, runs[index]), None)
        assert (None if taken is None else op.inplace[taken]) == storage
        runs[index] += 1
    assert not said


def test_a_chain_is_counted_by_hand():
    """Four layers of 100 bytes; the fullest moment is the last layer's backward: the results of
    layers 0 to 2, the cotangent and the gradient of layer 2's result."""
    plan = plan_within(prepared(HandMadeStep(chain(4), 2000)), None)
    assert plan.memory == {"parameters": 1000, "buffers": 10, "inputs": 100, "gradients": 0,
                           "optimizer": 0, "activations": 400, "temporaries": 100}
    assert plan.peak_bytes == 1610
    assert plan.resident_bytes == 1110


def test_the_optimizers_step_may_be_the_fullest_moment():
    step = HandMadeStep(chain(4), 2000, OptimizerMemory("adamw", 300, 5000))
    plan = plan_within(prepared(step), None)
    assert plan.peak_bytes == plan.optimizer_step_peak_bytes == 1110 + 300 + 4 * 7 + 5000
    assert plan.memory["optimizer"] == 300
    assert plan.memory["temporaries"] == 5000
    assert plan.memory["gradients"] == 28


def test_memory_by_category_is_a_mapping_that_refuses_other_names():
    memory = MemoryByCategory(parameters=3, activations=4)
    assert dict(memory)["parameters"] == 3 and memory.total_bytes == 7 and len(memory) == 7
    assert memory == dict(memory) and hash(memory) == hash(MemoryByCategory(3, activations=4))
    with pytest.raises(KeyError):
        memory["keys"]


@settings(max_examples=60, deadline=None)
@given(steps())
def test_only_forward_ops_are_replayed_and_only_beside_their_own_region(step):
    graph, problem = step.graph, lower(step.graph)
    for index, op in enumerate(graph.ops):
        assert problem.ops[index].recomputable == (op.phase is Phase.FORWARD and not op.pinned)
        for before in range(index + 1, len(graph.ops)):
            here = graph.ops[before]
            expected = problem.ops[index].recomputable and here.region == op.region and bool(
                here.digest or here.phase is Phase.FORWARD)
            assert problem.may_replay(index, before) == expected


def test_the_smallest_budget_counts_the_optimizer_too():
    step = HandMadeStep(chain(6), 3000)
    optimizer = OptimizerMemory("adam", 0, 700)
    heavy = HandMadeStep(chain(6), 3000, OptimizerMemory("adam", 0, 700))
    light = plan_within(prepared(step), 1452, Effort())
    assert light.peak_bytes <= 1452
    plan = plan_within(prepared(heavy), 1110 + 42 + optimizer.step_peak_bytes, Effort())
    assert plan.peak_bytes == 1852
