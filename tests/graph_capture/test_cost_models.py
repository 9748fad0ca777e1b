"""What a plan minimises: estimated or measured time, or recomputed FLOPs."""

from __future__ import annotations

import pytest

import planner
from planner._graph_capture.training_graph import Phase
from planner.api import capture
from tests.support import models


@pytest.fixture(scope="module")
def plans() -> dict[str, planner.Plan]:
    case = models.bert(layers=2, batch=4, seq=64, width=64)
    return {cost_model: planner.plan(case.model, case.inputs, budget="60%", time_limit=10,
                                     cost_model=cost_model)
            for cost_model in ("roofline", "flops")}


@pytest.mark.slow
def test_least_flops_recomputes_no_more_of_them_than_least_time(plans):
    assert 0 < plans["flops"].recompute_flops <= plans["roofline"].recompute_flops


@pytest.mark.slow
def test_the_overhead_of_least_flops_is_the_fraction_of_flops(plans):
    plan = plans["flops"]
    assert plan.overhead == pytest.approx(plan.recompute_flops / plan.step_flops, rel=0.02)
    assert plan.overhead_bound <= plan.overhead


def test_measured_seconds_are_kept_for_the_next_plan(monkeypatch, tmp_path):
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    case = models.language_model(layers=1)
    said = []
    first, second = (capture(case.model, case.inputs, loss_fn=case.loss_fn, cost_model="measured",
                             progress=said.append).base.graph for _ in range(2))
    assert [op.seconds for op in first.ops] == [op.seconds for op in second.ops]
    assert not any("seconds are estimated" in note for note in first.notes)
    assert any("timing ops" in line for line in said)
    products = [op for op in first.ops if op.target in ("aten.addmm.default", "aten.mm.default")]
    assert min(op.seconds for op in products) > 0
    # The head's product has four times the width of the projection's.
    seconds = {op.module: op.seconds for op in products if op.phase is Phase.FORWARD}
    assert seconds["head"] > seconds["blocks.0.proj"]


def test_a_plan_by_measured_seconds():
    case = models.language_model(layers=1)
    options = {"loss_fn": case.loss_fn, "cost_model": "measured", "time_limit": 3}
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        planner.plan(case.model, case.inputs, budget=1, **options)
    plan = planner.plan(case.model, case.inputs, budget=refusal.value.minimum_bytes, **options)
    assert plan.cost_model == "measured" and 0 < plan.overhead_bound <= plan.overhead


def test_what_cannot_be_timed_is_estimated_and_told():
    case = models.language_model(layers=1)
    plan = planner.plan(case.model.to("meta"), tuple(x.to("meta") for x in case.inputs),
                        loss_fn=lambda out: out.square().mean(), device="cuda",
                        cost_model="measured", probe=False)
    assert any("seconds are estimated" in note and "aten.addmm" in note for note in plan.notes)
