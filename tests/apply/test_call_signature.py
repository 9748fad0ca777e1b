"""A step that has another graph than the plan's is refused in words; one that has the same is not.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from tests.support.models import Case
from tests.support.training import measured_peak, reference, train

pytestmark = pytest.mark.compat


class Classifier(nn.Module):
    """Takes what a model of transformers takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, ids=None, labels=None, *, features=None, scale: float = 1.0, **kwargs):
        hidden = self.embedding(ids) if features is None else features
        for layer in self.layers:
            hidden = layer(hidden).tanh() + hidden
        logits = self.head(hidden) * scale
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss / kwargs.get("num_items_in_batch", labels.numel())}


def ids(batch: int = 4) -> torch.Tensor:
    return torch.arange(batch * 8).reshape(batch, 8) % 16


def step(**inputs: object) -> Case:
    torch.manual_seed(0)
    return Case(Classifier(), inputs, None)


def plan_of(case: Case) -> planner.Plan:
    return planner.plan(case.model, case.inputs, time_limit=1)


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    return plan_of(step(ids=ids(), labels=ids()))


def refusal(plan: planner.Plan, case: Case) -> str:
    with pytest.raises(planner.PlanMismatch) as caught:
        plan.apply(case.model)(**case.inputs)
    words, _, graph = str(caught.value).partition(": the plan does not fit")
    assert "first difference" in graph
    return words


same = ids()


@pytest.mark.parametrize("planned", [{"ids": same, "labels": same},
                                     {"ids": ids(), "labels": ids()}])
@pytest.mark.parametrize("trained", [{"ids": same, "labels": same},
                                     {"ids": ids(), "labels": ids()}])
def test_one_tensor_or_two_is_one_graph(planned, trained):
    plan, case = plan_of(step(**planned)), step(**trained)
    applied = plan.apply(case.model)
    assert train(applied, case).differences(reference(case)) == []
    assert measured_peak(applied, case) == plan.peak_bytes - plan.resident_bytes


def test_gradients_of_a_tensor_passed_twice_add_up():
    class Product(nn.Linear):
        def forward(self, left, right):
            return (super().forward(left) * right).sum()

    model, x = Product(4, 4), torch.randn(3, 4, requires_grad=True)
    plan = planner.plan(model, (x.detach().requires_grad_(), x.detach().requires_grad_()))
    plan.apply(model)(x, x).backward()
    mine, x.grad = x.grad, None
    model(x, x).backward()
    torch.testing.assert_close(mine, x.grad)


def test_aliases_count_once():
    once, twice = plan_of(step(ids=same, labels=same)), plan_of(step(ids=ids(), labels=ids()))
    assert twice.resident_bytes - once.resident_bytes == same.nbytes
    assert once.spec.regions == twice.spec.regions


def test_an_argument_that_came_or_went_is_named(plan):
    extra = step(ids=ids(), labels=ids(), num_items_in_batch=torch.tensor(7))
    assert refusal(plan, extra) == ("this call has `num_items_in_batch`, which the plan's inputs "
                                    "did not have")
    assert refusal(plan_of(extra), step(ids=ids(), labels=ids())) == (
        "the plan's inputs had `num_items_in_batch`, which this call has not")
    smoothed = step(ids=ids())
    assert "the plan's inputs had `labels`, which this call has not" in refusal(plan, smoothed)


def test_positional_and_keyword_arguments_are_the_same(plan):
    case = step(ids=ids(), labels=ids())
    plan.apply(case.model)(ids(), ids())["loss"].backward()


def test_layers_frozen_later_are_named(plan):
    case = step(ids=ids(), labels=ids())
    applied = plan.apply(case.model)
    applied(**case.inputs)
    case.model.layers[1].requires_grad_(False)
    with pytest.raises(planner.PlanMismatch, match=r"`layers.1.weight`, `layers.1.bias` are frozen "
                       r"now, and trained when the plan was made: "):
        applied(**case.inputs)
    case.model.layers[1].requires_grad_(True)
    applied(**case.inputs)


def test_inputs_that_require_a_gradient_are_named():
    features = torch.randn(4, 8, 8)
    plan = plan_of(step(features=features, labels=ids()))
    case = step(features=features.clone().requires_grad_(), labels=ids())
    assert refusal(plan, case) == ("`features` requires a gradient, which it did not in the plan's "
                                   "inputs")
    planned = plan_of(case).apply(case.model)
    planned(**case.inputs)["loss"].backward()
    assert case.inputs["features"].grad is not None


def test_dtype_autocast_values_and_sizes_are_named(plan):
    assert "`ids` is int64[4, 8], and was int32[4, 8]" in refusal(
        plan_of(step(ids=ids().int(), labels=ids())), step(ids=ids(), labels=ids()))
    assert "`ids` is int64[5, 8], and was int64[4, 8]" in refusal(
        plan, step(ids=ids(5), labels=ids(5)))
    assert "`scale`" in refusal(plan, step(ids=ids(), labels=ids(), scale=2.0))
    with torch.autocast("cpu", torch.bfloat16):
        words = refusal(plan, step(ids=ids(), labels=ids()))
    assert words == ("the plan was made without autocast, this step runs under autocast "
                     "(cpu bfloat16)")


def test_a_file_holds_the_call_signature(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = planner.load(tmp_path / "plan.json")
    assert loaded == plan
    assert [(key.name, key.kind) for key in loaded.spec.signature.inputs] == [
        ("ids", "int64[4, 8]"), ("labels", "int64[4, 8]")]
    assert "num_items_in_batch" in refusal(
        loaded, step(ids=ids(), labels=ids(), num_items_in_batch=torch.tensor(7)))


def test_another_wrapper_is_named(plan):
    case = step(ids=ids(), labels=ids())
    own = case.model.forward
    case.model.forward = lambda *args, **kwargs: {"loss": own(*args, **kwargs)["loss"] * 2}
    words = refusal(plan, case)
    assert "with its forward wrapped by" in words and "with the forward of its class" in words


@pytest.mark.slow
def test_buffers_made_as_such_are_captured_as_they_run():
    """A model of transformers that moves its buffer breaks the graph there, at both times."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.CTRLConfig(
        n_layer=1, n_embd=16, n_head=2, dff=16, vocab_size=32, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, use_cache=False))
    case = Case(model, {"input_ids": ids(), "labels": ids()}, None)
    plan = plan_of(case)
    applied = plan.apply(model)
    assert train(applied, case).distance(train(model, case)) <= 1e-6
    assert measured_peak(applied, case) == plan.peak_bytes - plan.resident_bytes


def test_a_nested_tensor_is_named():
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    with pytest.raises(planner.CaptureError, match="argument input is a nested tensor"):
        planner.within(net, "90%")(rows)
