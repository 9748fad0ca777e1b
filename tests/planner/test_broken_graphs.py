"""`torch.compile(model, backend="checkpoint_planner")` of models that break into several graphs;
the measured peak of the step and the plain model are the oracles."""

import copy
import logging

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.memory.allocator import record_peak
from tests.support import one_line_backend
from tests.support.compiler import needs_compiler
from tests.support.one_line_backend import QUICKLY, BreakingLayer, compiled


@pytest.fixture(autouse=True)
def backend_by_name():
    """Dynamo compiles one code eight times at most, for all models of this file."""
    torch._dynamo.reset()
    one_line_backend.register()


class InTwo(nn.Module):
    """A model of two graphs, with dropout."""

    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Sequential(*(layer for _ in range(2) for layer in (
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1),
            nn.Linear(4 * width, width)))) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


BATCH = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))


def losses_and_peaks(model, steps=4):
    """By `model`, trained with SGD; peaks above the parameters and the batch."""
    optimizer, losses, peaks = torch.optim.SGD(model.parameters(), lr=0.05), [], []

    def step():
        loss = model(BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for number in range(steps):
        torch.manual_seed(number)
        peaks.append(record_peak(step, "cpu").peak_bytes)
    return losses, peaks


def in_place(model, **options):
    model.compile(backend="checkpoint_planner", options={**QUICKLY, **options})
    return model


@pytest.mark.parametrize("compile_model", [
    compiled, pytest.param(in_place, marks=pytest.mark.slow)])
def test_one_budget_holds_for_all_graphs_and_from_the_first_step_on(compile_model, caplog):
    plain = InTwo()
    expected, plain_peaks = losses_and_peaks(copy.deepcopy(plain))
    resident = sum(p.nbytes for p in plain.parameters()) + BATCH.nbytes
    budget = resident + int(0.6 * max(plain_peaks))
    with caplog.at_level(logging.INFO, "planner"):
        losses, peaks = losses_and_peaks(compile_model(plain, budget=budget))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert max(peaks) + resident <= budget
    assert "from the next on they are planned together" in caplog.text
    plan = planner.plan_of(plain)
    assert plan.peak_bytes <= budget and len(plan.spec.regions) == 2
    assert planner.steps_of(plain).unplanned == 0


@pytest.mark.slow
def test_a_percentage_is_of_the_whole_step():
    model = InTwo()
    losses_and_peaks(compiled(model, budget="70%"))
    whole = planner.plan(InTwo(), BATCH, optimizer="sgd")
    assert planner.plan_of(model).budget_bytes == pytest.approx(
        0.7 * whole.baseline_peak_bytes, rel=0.02)


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_is_refused_for_the_whole_step():
    model = compiled(InTwo(), budget=900_000)
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        losses_and_peaks(model, steps=2)
    assert refusal.value.minimum_bytes > 900_000


@pytest.mark.slow
@needs_compiler
def test_under_inductor():
    plain = InTwo()
    expected, plain_peaks = losses_and_peaks(copy.deepcopy(plain), steps=3)
    resident = sum(p.nbytes for p in plain.parameters()) + BATCH.nbytes
    budget = resident + int(0.6 * max(plain_peaks))
    losses, peaks = losses_and_peaks(compiled(plain, budget=budget, inductor=True,
                                              time_limit=20), steps=3)
    assert max(peaks[1:]) + resident <= budget
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)  # it runs op by op
    assert all(abs(loss) < 10 for loss in losses)
    assert planner.plan_of(plain).spec.backend == "inductor"


@pytest.mark.slow
def test_steps_without_gradients_run_as_they_did():
    model = compiled(InTwo().eval(), budget="60%")
    with torch.no_grad():
        before = model(BATCH)
    losses_and_peaks(model, steps=3)
    with torch.no_grad():
        assert model(BATCH) < before


def test_a_compiled_function_is_planned_graph_by_graph_and_a_warning_says_so(caplog):
    layer = BreakingLayer()

    def call(x):
        return layer(x)

    function = torch.compile(call, backend="checkpoint_planner",
                             options={"inductor": False, "budget": "100%", "time_limit": 1})
    with caplog.at_level(logging.WARNING, "planner"):
        function(torch.randn(4, 8)).sum().backward()
    assert "as if it were alone" in caplog.text
    assert planner.plan_of(layer) is None
