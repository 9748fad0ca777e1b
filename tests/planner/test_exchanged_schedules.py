"""A training step that is planned again runs under the new schedule without another trace."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import planner
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.module_forward import forward_override
from planner.attached.symbolic_graph import SymbolicGraph


class Wide(nn.Module):
    """Three layers whose last activation is also the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 64), nn.Linear(64, 64),
                                               nn.Linear(64, 8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(values).sin()).sin()
        return self.third(nn.functional.dropout(hidden, 0.2, self.training)).exp()


class Constant(Wide):
    """Makes a tensor of Python numbers."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values * torch.tensor([0.5, *range(7)]))


class Broken(Wide):
    """Its graph breaks before the last layer."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(values).sin()).sin()
        torch._dynamo.graph_break()
        return self.third(hidden).exp()


class Masked(Wide):
    """Puts a product in the place of a parameter's data, which breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(64, 8).tril())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.first.weight.data *= self.mask
        return super().forward(values)


def train(model: nn.Module, steps: int) -> list[torch.Tensor]:
    """Gradients after each of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for index in range(steps):
        torch.manual_seed(index)
        optimizer.zero_grad()
        model(torch.randn(900, 8)).pow(2).mean().backward()
        seen += [parameter.grad.clone() for parameter in model.parameters()
                 if parameter.grad is not None]
        optimizer.step()
    return seen


@pytest.mark.parametrize(("kind", "budget"), [
    (Wide, "70%"), (Wide, "90%"), (Wide, "100%"), (Broken, "90%"), (Masked, "90%")])
def test_a_second_plan_takes_no_trace_and_its_gradients_are_right(kind, budget):
    plain = kind()
    model = planner.within(copy.deepcopy(plain), budget)
    for mine, theirs in zip(train(model, 4), train(plain, 4), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    graph, = forward_override(model).graphs
    assert graph.plans_made > 1
    assert graph.code.compilations == 0  # the code of capture runs
    assert planner.status(model).planned_steps == 4


def test_the_model_is_traced_once():
    model = planner.within(Wide(), "75%")
    counters["stats"].clear()
    train(model, 4)
    assert counters["stats"]["unique_graphs"] == 1
    assert planner.status(model).plans > 1


@pytest.mark.parametrize("change", ["forward of the instance", "frozen layer", "constant"])
def test_what_the_code_of_capture_does_not_serve_is_traced_again(change):
    plain = Constant() if change == "constant" else Wide()
    if change == "forward of the instance":
        plain.forward = functools.partial(type(plain).forward, plain)
    model = copy.deepcopy(plain)
    if change == "forward of the instance":
        model.forward = functools.partial(type(model).forward, model)
    planner.within(model, "90%")
    for _ in range(2):
        for each in (model, plain):
            train(each, 2)
            if change == "frozen layer":
                each.zero_grad()
                each.first.requires_grad_(False)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert planner.status(model).planned_steps == 4


def test_an_applied_plan_runs_the_code_of_planning():
    plain = Wide()
    model = copy.deepcopy(plain)
    counters["stats"].clear()
    plan = planner.plan(model, torch.randn(900, 8), budget="75%")
    planned = plan.apply(model)
    for mine, theirs in zip(train(planned, 3), train(plain, 3), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert counters["stats"]["unique_graphs"] == 1
    assert planner.steps_of(planned).planned == 3


def double(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


@pytest.mark.parametrize("change", ["hook", "attribute", "frozen layer"])
def test_a_model_changed_since_it_was_planned_does_not_run_that_code(change):
    model = Wide()
    plan = planner.plan(model, torch.randn(900, 8), budget="75%")
    if change == "hook":
        model.second.register_forward_hook(double)
    elif change == "attribute":
        model.third = nn.Sequential(model.third)
    else:
        model.second.requires_grad_(False)
    with pytest.raises(planner.PlanMismatch):
        train(plan.apply(model), 1)


def test_the_code_of_another_plan_is_not_taken_for_this_one():
    plain = Wide()
    model = copy.deepcopy(plain)
    plan = planner.plan(model, torch.randn(900, 8), budget="75%")
    planner.plan(model.eval(), torch.randn(700, 8))
    planned = plan.apply(model.train())
    for mine, theirs in zip(train(planned, 2), train(plain, 2), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert planner.steps_of(planned).planned == 2


def test_the_peak_under_an_exchanged_schedule_is_the_predicted_one():
    model = planner.within(Wide(), "75%", hold_output=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(900, 8)

    def step() -> None:
        output = model(batch)
        output.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    resident = sum(each.nbytes for each in (*model.parameters(), batch))
    graph, = forward_override(model).graphs
    assert graph.plans_made > 1
    assert graph.code.compilations == 0  # the code of capture runs
    assert record_peak(step, "cpu").peak_bytes + resident == planner.plan_of(model).peak_bytes


def test_a_graph_may_be_kept_after_a_backward_that_kept_none():
    plain = Wide()
    model = planner.within(copy.deepcopy(plain), "98%")
    train(model, 2)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each.zero_grad()
        each.eval()
        loss = each(torch.ones(900, 8)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("changed", ["output", "weight"])
def test_a_saved_tensor_that_was_changed_is_refused(changed, dynamic):
    model = planner.within(Wide(), "98%", dynamic=dynamic)
    output = model(torch.randn(900, 8))
    loss = output.sum()
    with torch.no_grad():
        (output.detach() if changed == "output" else model.third.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dynamic", [None, True])
def test_what_the_backward_does_not_read_may_change(dynamic):
    model = planner.within(Wide(), "98%", dynamic=dynamic)
    loss = model(torch.randn(900, 8)).sum()
    with torch.no_grad():
        model.third.bias.mul_(2)
    loss.backward()
    assert model.first.weight.grad is not None


@pytest.mark.parametrize("dynamic", [None, True])
def test_an_output_without_a_backward_is_freed_with_what_it_saves(dynamic):
    model = planner.within(Wide(), "98%", dynamic=dynamic)
    model(torch.randn(900, 8)).sum().backward()
    output = model(torch.randn(900, 8))
    storage = weakref.ref(output.untyped_storage())
    gc.disable()
    try:
        del output
        assert storage() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_pending_call_ends_under_the_schedule_that_it_began_under():
    plain = Wide().eval()
    model = planner.within(copy.deepcopy(plain), "80%")
    losses = {each: each(torch.ones(900, 8)).sum() for each in (model, plain)}
    graph, = forward_override(model).graphs
    other = planner.plan(model, (torch.ones(900, 8),))
    assert graph.code.exchange(other.spec)
    for each in (model, plain):
        each(torch.ones(900, 8)).mean().backward()
        losses[each].backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_output_of_any_size_takes_one_trace():
    plain = Wide().eval()
    model = planner.within(copy.deepcopy(plain), "90%")
    for rows in (120, 90, 70, 33):
        for each in (model, plain):
            each.zero_grad()
            each(torch.ones(rows, 8)).pow(2).mean().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert forward_override(model).graphs[0].code.compilations == 1
    assert isinstance(forward_override(model).graphs[0], SymbolicGraph)
