"""A plan on another model, or on other inputs, is refused and the first difference named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from tests.support import models
from tests.support.models import Case

SIZE = {"layers": 2, "batch": 2, "seq": 8, "width": 16, "vocab": 32}


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    case = models.dropout_everywhere(**SIZE)
    return planner.plan(case.model, case.inputs, loss_fn=case.loss_fn)


def refusal(plan: planner.Plan, case: Case) -> str:
    """What is said when a step of `case` runs under `plan`."""
    with pytest.raises(planner.PlanMismatch) as caught:
        case.loss_fn(plan.apply(case.model)(*case.args)).backward()
    assert isinstance(caught.value, planner.PlannerError)
    case.model.zero_grad()
    return str(caught.value)


def changed(**size) -> Case:
    return models.dropout_everywhere(**{**SIZE, **size})


def test_the_same_model_made_anew_is_served(plan):
    case = changed()
    case.loss_fn(plan.apply(case.model)(*case.args)).backward()
    assert all(p.grad is not None for p in case.model.parameters())


def test_another_depth_shows_at_once(plan):
    for layers in (1, 3):
        case = changed(layers=layers)
        with pytest.raises(planner.PlanMismatch, match=r"first difference.*(blocks\.2|head)"):
            plan.apply(case.model)


def test_another_width_shows_at_once(plan):
    with pytest.raises(planner.PlanMismatch, match=r"embedding\.weight .*\[32, 16\].*\[32, 32\]"):
        plan.apply(changed(width=32).model)


def test_frozen_parameters_show_at_once(plan):
    case = changed()
    case.model.blocks[1].up.requires_grad_(False)
    with pytest.raises(planner.PlanMismatch, match=r"blocks\.1\.up\.weight \(.*, frozen\)"):
        plan.apply(case.model)


def test_another_dtype_shows_at_once(plan):
    with pytest.raises(planner.PlanMismatch, match=r"float32.*bfloat16"):
        plan.apply(changed().model.bfloat16())


def test_another_buffer_shows_at_once(plan):
    case = changed()
    case.model.register_buffer("extra", torch.zeros(3))
    with pytest.raises(planner.PlanMismatch, match="only this model has extra"):
        plan.apply(case.model)


def test_another_dropout_probability_shows_in_the_first_step(plan):
    case = changed()
    case.model.blocks[1].drop.p = 0.5
    assert "blocks.1.drop/checkpoint_planner.fresh_bernoulli.float#0" in refusal(plan, case)


@pytest.mark.parametrize("size", [{"batch": 3}, {"seq": 12}])
def test_another_shape_of_input_shows_in_the_first_step(plan, size):
    text = refusal(plan, changed(**size))
    assert "embedding/aten.embedding#0 -> float32[2, 8, 16]" in text
    assert "Make a plan" in text


def test_another_op_shows_in_the_first_step(plan):
    case = changed()
    case.model.blocks[0].norm2 = nn.Identity()
    with pytest.raises(planner.PlanMismatch, match=r"blocks\.0\.norm2\.weight"):
        plan.apply(case.model)
    case = changed()
    case.model.blocks[0].norm2.eps = 1e-3
    assert "blocks.0.norm2/aten.native_layer_norm#0" in refusal(plan, case)


def test_a_gradient_through_an_output_that_had_none_is_refused():
    case = models.many_outputs(width=16)
    plan = planner.plan(case.model, case.inputs)
    output = plan.apply(case.model)(*case.args)
    with pytest.raises((planner.PlanMismatch, ValueError), match="took for one without"):
        (output["loss"] + output["hidden"].sum()).backward()


def test_the_model_is_usable_after_a_refusal(plan):
    case = changed(batch=3)
    planned = plan.apply(case.model)
    with pytest.raises(planner.PlanMismatch):
        planned(*case.args)
    case.loss_fn(case.model(*case.args)).backward()
    with torch.no_grad():
        planned(*case.args)
