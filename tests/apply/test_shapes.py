"""A plan and inputs of other sizes than it was made with."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import planner
from tests.support.models import BUILDERS, Case, language_model
from tests.support.training import measured_peak, plan_or_smallest, reference, train

pytestmark = pytest.mark.compat

PLANNED = {"batch": 5, "seq": 24}


def resized(case: Case, name: str, **size: int) -> Case:
    """The case's model with inputs (and a loss) of another size."""
    return BUILDERS[name](**size)._replace(model=copy.deepcopy(case.model))


def plan_of(case: Case, **options: object) -> planner.Plan:
    """By default within 80% of the plain step's peak, or the smallest budget where that is more."""
    return plan_or_smallest(case.model, case.inputs, **{
        "loss_fn": case.loss_fn, "time_limit": 1, "budget": "80%", **options})


@pytest.fixture(scope="module")
def largest() -> Case:
    return BUILDERS["dropout_everywhere"](**PLANNED)


@pytest.fixture(scope="module")
def plan(largest) -> planner.Plan:
    return plan_of(largest)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "graph_break", "lora", "autocast"])
def test_a_plan_serves_smaller_batches_and_shorter_sequences(name):
    case = BUILDERS[name](layers=1, **PLANNED)
    plan = plan_of(case)
    model = plan.apply(case.model)
    limit = plan.budget_bytes - plan.resident_bytes
    for size in ({"batch": 3, "seq": 24}, {"batch": 5, "seq": 17}):
        smaller = BUILDERS[name](layers=1, **size)._replace(model=case.model)
        assert train(model, smaller).differences(reference(smaller)) == []
        assert measured_peak(model, smaller) <= limit


@pytest.mark.slow
def test_a_plan_serves_smaller_batches_of_images():
    case = BUILDERS["vit"](batch=6, layers=1)
    plan = plan_of(case)
    smaller = BUILDERS["vit"](batch=2, layers=1)._replace(model=case.model)
    model = plan.apply(case.model)
    assert train(model, smaller).differences(reference(smaller)) == []
    assert measured_peak(model, smaller) <= plan.budget_bytes - plan.resident_bytes


@pytest.mark.slow
def test_the_budget_holds_over_a_stream_of_sizes(largest, plan):
    model = plan.apply(largest.model)
    sizes = random.Random(1)
    peaks = {}
    for _ in range(6):
        size = {key: sizes.randint(2, most) for key, most in PLANNED.items()}
        peaks[tuple(size.values())] = measured_peak(
            model, resized(largest, "dropout_everywhere", **size))
    assert max(peaks.values()) <= plan.budget_bytes - plan.resident_bytes
    assert len(set(peaks.values())) > 3


def test_inputs_marked_dynamic_are_compiled_for_their_sizes(largest, plan):
    model = plan.apply(largest.model)
    small = resized(largest, "dropout_everywhere", batch=3, seq=24)
    marked = next(iter(small.inputs.values() if isinstance(small.inputs, dict) else small.inputs))
    torch._dynamo.mark_dynamic(marked, 0)
    assert measured_peak(model, small) <= plan.budget_bytes - plan.resident_bytes
    assert marked._dynamo_dynamic_indices == {0}


@pytest.mark.parametrize("size", [{"batch": 6, "seq": 24}, {"batch": 5, "seq": 25}])
def test_larger_inputs_are_refused(largest, plan, size):
    larger = resized(largest, "dropout_everywhere", **size)
    model = plan.apply(larger.model)
    with pytest.raises(planner.PlanMismatch, match=r"bytes where the plan has .* made with"):
        model(*larger.args)


def test_a_loaded_plan_serves_the_same_sizes(largest, plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    smaller = resized(largest, "dropout_everywhere", batch=2, seq=24)
    model = planner.load(tmp_path / "plan.json").apply(smaller.model)
    assert train(model, smaller).differences(reference(smaller)) == []


def test_sizes_do_not_excuse_another_model(largest, plan):
    smaller = resized(largest, "dropout_everywhere", batch=2, seq=24)
    for module in smaller.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with pytest.raises(planner.PlanMismatch, match="first difference"):
        plan.apply(smaller.model)(*smaller.args)


def test_other_values_with_the_same_sizes_are_another_model():
    """A constant that looks like a size may differ only where the inputs' sizes do."""
    class Scaled(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.count = count

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x).relu() / self.count).sum()

    plan = planner.plan(Scaled(4), (torch.randn(4, 8),))
    plan.apply(Scaled(4))(torch.randn(4, 8))
    with pytest.raises(planner.PlanMismatch, match="div"):
        plan.apply(Scaled(3))(torch.randn(4, 8))


@pytest.mark.slow
def test_larger_inputs_are_planned_again_on_request(largest, plan):
    asked = []

    def replan(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> planner.Plan:
        asked.append(tuple(inputs[0].shape))
        return plan_of(larger._replace(model=model, inputs=inputs), budget=budget)

    larger = resized(largest, "dropout_everywhere", batch=7, seq=24)
    budget = plan_of(larger, budget="70%").budget_bytes
    smaller = larger._replace(inputs=(largest.args[0][:3],),
                              loss_fn=lambda out: out.square().mean())
    model = plan.apply(larger.model, replan=replan)
    for case in (larger, smaller, larger):
        assert train(model, case).differences(reference(case)) == []
        assert measured_peak(model, case) + plan.resident_bytes <= budget
    assert asked == [(7, 24)]


def test_what_replan_returns_is_checked(largest, plan):
    with pytest.raises(TypeError, match="replan must be a function"):
        plan.apply(largest.model, replan="8GB")
    larger = resized(largest, "dropout_everywhere", batch=7, seq=24)
    model = plan.apply(larger.model, replan=lambda model, inputs: None)
    with pytest.raises(TypeError, match=r"result of replan .* NoneType"):
        model(*larger.args)


def test_replan_gets_the_inputs_as_plan_takes_them():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, scale: float = 1.0, **more: torch.Tensor):
            return (self.linear(x) * scale + more["bias"]).relu().sum()

    def replan(model: nn.Module, inputs: object) -> planner.Plan:
        assert set(inputs) == {"x", "scale", "bias"}
        return planner.plan(model, inputs)

    model = Mixed()
    plan = planner.plan(model, {"x": torch.randn(4, 8), "scale": 2.0, "bias": torch.randn(8)})
    applied = plan.apply(model, replan=replan)
    applied(torch.randn(6, 8), 2.0, bias=torch.randn(8)).backward()
    assert model.linear.weight.grad is not None


def test_a_single_row_is_another_graph():
    """torch drops the dimension's strides from what it traces, and some ops with it."""
    case = language_model(batch=4)
    plan = plan_of(case)
    single = language_model(batch=1)._replace(model=case.model)
    model = plan.apply(case.model, replan=lambda model, inputs: planner.plan(
        model, inputs, loss_fn=single.loss_fn, budget=plan.budget_bytes, time_limit=3))
    assert train(model, single).differences(reference(single)) == []
