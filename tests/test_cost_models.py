"""What a plan minimises: estimated time, or recomputed FLOPs."""

from __future__ import annotations

import pytest

import planner
from tests import models


@pytest.fixture(scope="module")
def plans() -> dict[str, planner.Plan]:
    case = models.bert(layers=2, batch=4, seq=64, width=64)
    return {cost_model: planner.plan(case.model, case.inputs, budget="60%", time_limit=10,
                                     cost_model=cost_model)
            for cost_model in ("roofline", "flops")}


def test_least_flops_recomputes_no_more_of_them_than_least_time(plans):
    assert 0 < plans["flops"].recompute_flops <= plans["roofline"].recompute_flops


def test_the_overhead_of_least_flops_is_the_fraction_of_flops(plans):
    plan = plans["flops"]
    assert plan.overhead == pytest.approx(plan.recompute_flops / plan.step_flops, rel=0.02)
    assert plan.overhead_bound <= plan.overhead
