"""Applied plans against the plain model: numbers to the last bit, memory to the byte.

The oracle for numbers is the same model under `torch.compile(backend="eager")`, which accumulates
gradients in the same order and changes nothing else; the oracle for memory is the allocator.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.search.planning import Effort, plan_within
from tests.support import models
from tests.support.models import BUILDERS, CONVOLUTIONAL, Case
from tests.support.training import (
    Subject,
    apply_schedule,
    captured,
    measured_peak,
    random_schedule,
    subject,
    train,
)

SHARES = (None, 0.8, 0.6, 0.4, 0.0)
"""Of what the unplanned step takes above its resident memory; 0 stands for the smallest budget."""

THOROUGH = ("dropout_everywhere", "resnet", "graph_break")
"""Models that are planned under every budget; the others under one."""

PLANS = [
    pytest.param(name, share, id=f"{name}-{'keep all' if share is None else share}")
    for number, name in enumerate(BUILDERS)
    for share in (SHARES if name in THOROUGH else (SHARES[1 + number % 2],))
]


def applied(owner: Subject, plan: planner.Plan) -> nn.Module:
    return plan.apply(owner.case.model)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), PLANS)
def test_a_planned_step_gives_the_same_numbers_within_its_budget(name, share):
    owner = subject(name)
    plan = owner.plan_at(share)
    model = applied(owner, plan)
    trace = train(model, owner.case, steps=2)
    assert trace.differences(owner.reference) == []
    assert trace.distance(owner.plain) <= 1e-6
    measured = measured_peak(model, owner.case)
    predicted = plan.peak_bytes - plan.resident_bytes
    assert measured <= predicted
    assert measured == pytest.approx(predicted, rel=0.02 if name in CONVOLUTIONAL else 0.005)
    if plan.budget_bytes is not None:
        assert measured + plan.resident_bytes <= plan.budget_bytes
    assert owner.plan_at(None).peak_bytes <= 1.001 * plan.baseline_peak_bytes


@pytest.mark.parametrize("name", [
    "resnet", pytest.param("dropout_everywhere", marks=pytest.mark.slow)])
def test_overhead_does_not_rise_with_the_budget(name):
    owner = subject(name)
    overheads = [owner.plan_at(share).overhead for share in (0.0, 0.4, 0.6, 0.8, None)]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[0] > overheads[-1]
    assert plan_within(owner.step, None, Effort(solver="none")).overhead == 0


# --- The applied model is the model ---------------------------------------------------------------


@pytest.fixture
def owner() -> Subject:
    return subject("dropout_everywhere")


@pytest.fixture
def planned(owner) -> nn.Module:
    return applied(owner, owner.plan_at(0.0))


def test_parameters_buffers_and_state_are_shared(owner, planned):
    model = owner.case.model
    assert type(planned) is type(model) and planned is not model
    assert list(planned.state_dict()) == list(model.state_dict())
    assert [id(p) for p in planned.parameters()] == [id(p) for p in model.parameters()]
    assert [name for name, _ in planned.named_modules()] == [
        name for name, _ in model.named_modules()]
    other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    before = copy.deepcopy(model.state_dict())
    planned.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
    model.load_state_dict(before)


def test_the_model_itself_stays_as_it_was(owner):
    case = models.language_model(layers=1)
    fields = set(vars(case.model))
    before = train(case.model, case)
    plan = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn)
    planned = plan.apply(case.model)
    train(planned, case)
    assert set(vars(case.model)) == fields
    assert train(case.model, case).differences(before) == []


def plain_and_planned(owner, planned, run):
    """What `run` returns for the plain and for the planned model from the same random state."""
    results = []
    for model in (owner.case.model, planned):
        torch.manual_seed(11)
        results.append(run(model))
    return results


def test_without_gradients_the_plain_forward_runs(owner, planned):
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            mine, theirs = plain_and_planned(owner, planned, lambda m: m(*owner.case.args))
        assert torch.equal(mine, theirs) and not theirs.requires_grad


def test_eval_mode_is_followed_and_said_once(owner, planned):
    model = owner.case.model
    try:
        planned.eval()
        assert not any(module.training for module in model.children())
        with pytest.warns(UserWarning, match="train mode; this step in eval mode"):
            first = planned(*owner.case.args)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = planned(*owner.case.args)
        assert torch.equal(first, second)  # no dropout
        first.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        planned.train()
        model.train()
        model.zero_grad()


def test_a_plan_for_eval_mode_runs_in_eval_mode():
    case = models.dropout_everywhere(layers=1)
    case.model.eval()
    step = captured(case)
    planned, _ = apply_schedule(case, step, random_schedule(step.base.problem, 0, 0.8))
    reference = train(torch.compile(case.model, backend="eager"), case)
    assert train(planned, case).differences(reference) == []


def test_training_with_an_optimizer_takes_the_same_course():
    timelines = []
    for planned in (False, True):
        case = models.dropout_everywhere(layers=1)
        model = case.model
        run = torch.compile(model, backend="eager")
        if planned:
            step = captured(case)
            run, _ = apply_schedule(case, step, random_schedule(step.base.problem, 0, 0.8))
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
        torch.manual_seed(3)
        losses = []
        for _ in range(4):
            loss = case.loss_fn(run(*case.args))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        timelines.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert timelines[0][0] == timelines[1][0] and len(set(timelines[0][0])) == 4
    assert all(torch.equal(a, b) for a, b in zip(timelines[0][1], timelines[1][1], strict=True))


def test_shared_parameters_get_the_sum_of_their_gradients():
    owner = subject("tied")
    model = owner.case.model
    assert model.head.weight is model.embedding.weight
    trace = train(applied(owner, owner.plan_at(0.6)), owner.case)
    assert trace.differences(owner.reference) == []
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in owner.reference.gradients


def test_hooks_of_autograd_fire(owner, planned):
    model = owner.case.model
    seen = {"plain": [], "planned": []}
    for kind, run in (("plain", model), ("planned", planned)):
        model.zero_grad()
        torch.manual_seed(0)
        output = run(*owner.case.args)
        handles = [
            output.register_hook(lambda g, kind=kind: seen[kind].append(g.norm().item())),
            *(p.register_hook(lambda g, kind=kind: seen[kind].append(g.norm().item()))
              for p in list(model.parameters())[:2]),
            *(p.register_post_accumulate_grad_hook(
                lambda p, kind=kind: seen[kind].append(p.grad.norm().item()))
              for p in list(model.parameters())[-2:])]
        owner.case.loss_fn(output).backward()
        for handle in handles:
            handle.remove()
    model.zero_grad()
    assert len(seen["plain"]) == 5
    assert sorted(seen["planned"]) == pytest.approx(sorted(seen["plain"]), rel=1e-5)


def test_a_graph_may_be_differentiated_twice(owner, planned):
    model = owner.case.model
    model.zero_grad()
    torch.manual_seed(1)
    loss = owner.case.loss_fn(planned(*owner.case.args))
    state = torch.get_rng_state()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    for p, first in zip(model.parameters(), once, strict=True):
        assert torch.equal(p.grad, first + first)
    model.zero_grad()


def test_nothing_outlives_the_step():
    case = models.dropout_everywhere(layers=1)
    planned = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn).apply(case.model)
    output = planned(*case.args)
    kept = weakref.ref(output.untyped_storage())
    case.loss_fn(output).backward()
    del output
    assert kept() is None


# --- Gradients against finite differences ---------------------------------------------------------


class _Smooth(nn.Module):
    """Smooth in every parameter, with dropout in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3) * F.dropout(x, 0.2).sigmoid()
        return x


def test_gradients_with_dropout_are_finite_differences():
    torch.manual_seed(0)
    model = _Smooth().double()
    x = torch.randn(5, 6, dtype=torch.float64)
    case = Case(model, (x,), lambda out: out.square().sum())
    step = captured(case)
    schedule = random_schedule(step.base.problem, 0, 1.0)
    again = [step.base.problem.ops[op].name for op, runs in Counter(schedule).items() if runs > 1]
    assert any("bernoulli" in name for name in again)
    planned, _ = apply_schedule(case, step, schedule)

    def loss(run) -> torch.Tensor:
        torch.manual_seed(7)
        return case.loss_fn(run(x))

    loss(planned).backward()
    for parameter in model.parameters():
        direction = torch.randn_like(parameter)
        step_size = 1e-6
        with torch.no_grad():
            parameter += step_size * direction
            above = loss(model)
            parameter -= 2 * step_size * direction
            below = loss(model)
            parameter += step_size * direction
        slope = (above - below) / (2 * step_size)
        torch.testing.assert_close((parameter.grad * direction).sum(), slope, rtol=1e-6, atol=1e-8)
