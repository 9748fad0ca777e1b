"""`torch.compile(model, backend="checkpoint_planner", options=…)`."""

import copy
import logging
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.memory.allocator import record_peak
from planner.torch_compile_backend import checkpoint_planner, read_options
from tests.support import one_line_backend
from tests.support.one_line_backend import BreakingLayer, compiled

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def backend_by_name():
    one_line_backend.register()


def make_model(*, dropout=0.1, width=32):
    torch.manual_seed(0)
    stack = []
    for _ in range(3):
        stack += [nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout),
                  nn.Linear(4 * width, width)]
    return nn.Sequential(*stack)


class WithLoss(nn.Module):
    """Returns its loss beside its output, as transformers do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return {"loss": y.square().mean(), "logits": y}


def batch(size=256):
    return torch.randn(size, 32, generator=torch.Generator().manual_seed(1))


def step(model, x, seed=3):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = model(x)
    output["loss"].backward()
    return output


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_the_entry_point_is_declared():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"][
        "checkpoint_planner"].partition(":")
    assert module == checkpoint_planner.__module__
    assert name == checkpoint_planner.__name__


@pytest.mark.slow
def test_the_first_call_plans_and_every_call_keeps_the_budget(caplog):
    model = WithLoss(make_model())
    x = batch()
    step(model, x)
    reference = gradient(model)
    plain = record_peak(lambda: step(model, x), "cpu").peak_bytes
    resident = sum(p.numel() * 4 for p in model.parameters()) + x.numel() * 4
    with caplog.at_level(logging.INFO, logger="planner.torch_compile_backend"):
        planned = compiled(model, budget=resident + int(0.8 * plain))
        output = step(planned, x)
    assert "budget" in caplog.text
    assert "recomputed" in caplog.text
    assert output["logits"].shape == x.shape
    assert torch.equal(gradient(model), reference)
    model.zero_grad(set_to_none=True)
    assert record_peak(lambda: step(planned, x), "cpu").peak_bytes <= int(0.8 * plain)
    assert torch.equal(gradient(model), reference)


@pytest.mark.slow
def test_an_infeasible_budget_tells_the_minimum():
    model = WithLoss(make_model())
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        step(compiled(model, budget="1kB"), batch())
    assert refusal.value.minimum_bytes > refusal.value.budget_bytes == 1000
    minimum = refusal.value.minimum_bytes
    step(compiled(model, budget=minimum), batch())


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_smaller_shapes_run_the_plan_of_larger_ones(caplog, dynamic):
    model = WithLoss(make_model(dropout=0.0))
    planned = compiled(model, budget_gb=1, dynamic=dynamic)
    with caplog.at_level(logging.INFO, logger="planner.torch_compile_backend"):
        for size in (64, 32, 96, 64, 80):
            step(planned, batch(size))
            found = gradient(model)
            step(model, batch(size))
            assert torch.allclose(gradient(model), found, rtol=1e-5, atol=1e-9)
    assert caplog.text.count("planned for eager") == 2  # for 64 and for 96


def test_without_gradients_it_runs_plainly():
    model = make_model(dropout=0.0)
    with torch.no_grad():
        found = compiled(model, budget="1kB")(batch())
        assert torch.allclose(found, model(batch()))


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match=r"no option 'budgets'.*known: budget_gb"):
        read_options({"budgets": 3})


@pytest.mark.slow
def test_with_inductor_an_output_may_go_without_gradient():
    class TwoOutputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            hidden = self.first(x).tanh()
            return hidden, self.second(hidden)

    model, x = TwoOutputs(), batch()
    planned = torch.compile(model, backend="checkpoint_planner", options={"time_limit": 2.0})
    model(x)[1].square().mean().backward()
    expected = gradient(model)
    model.zero_grad()
    planned(x)[1].square().mean().backward()
    assert torch.allclose(gradient(model), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_with_inductor():
    model = WithLoss(make_model(dropout=0.0))
    step(model, batch())
    reference = gradient(model)
    planned = torch.compile(model, backend="checkpoint_planner",
                            options={"budget_gb": 1, "optimizer": "adamw", "time_limit": 5.0})
    step(planned, batch())
    found = gradient(model)
    assert float((found - reference).norm() / reference.norm()) <= 1e-5


def test_a_later_step_that_does_not_fit_runs_under_the_leanest_schedule(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    small, large = torch.randn(32, 64), torch.randn(512, 64)
    plain = planner.plan(model, small, budget=None)
    planned = compiled(copy.deepcopy(model), budget=plain.peak_bytes, time_limit=1)
    planned(small).sum().backward()
    with caplog.at_level(logging.WARNING, "planner"):
        planned(large).sum().backward()
    assert "takes least" in caplog.text


@pytest.mark.slow
def test_layers_that_share_a_graph_have_parameters_of_their_own():
    torch.manual_seed(0)
    plain = nn.Sequential(*(BreakingLayer() for _ in range(3)))
    model = copy.deepcopy(plain)
    x = torch.randn(4, 8)
    for net in (plain, compiled(model, budget="100%")):
        for _ in range(2):
            net(x).square().mean().backward()
    assert torch.equal(gradient(model), gradient(plain))
