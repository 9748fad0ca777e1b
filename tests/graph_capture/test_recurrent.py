"""Recurrent layers: the numbers of the plain step, dropout between layers included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from tests.support.models import Case
from tests.support.training import measured_peak, reference, train

pytestmark = pytest.mark.compat


class Recurrent(nn.Module):
    """Its loss depends on the last states as well."""

    def __init__(self, kind: str, **options: object) -> None:
        super().__init__()
        self.inner = getattr(nn, kind)(8, 12, num_layers=3, dropout=0.4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flow, states = self.inner(x)
        states = states if isinstance(states, tuple) else (states,)
        return flow.square().mean() + sum(state.square().mean() for state in states)


@pytest.mark.parametrize(("kind", "options"), [
    pytest.param("GRU", {"bidirectional": True}, marks=pytest.mark.slow),
    ("RNN", {"batch_first": True, "bias": False, "nonlinearity": "relu"}),
    pytest.param("LSTM", {"batch_first": True, "bidirectional": True}, marks=pytest.mark.slow),
])
def test_dropout_between_layers_is_that_of_the_plain_step(kind, options):
    torch.manual_seed(0)
    case = Case(Recurrent(kind, **options), (torch.randn(5, 4, 8),), None)
    plain = reference(case)
    plan = planner.plan(case.model, case.inputs, budget="90%", time_limit=1)
    model = plan.apply(case.model)
    trace = train(model, case)
    assert trace.distance(plain) <= 1e-6
    assert torch.equal(trace.random_state, plain.random_state)
    assert measured_peak(model, case) <= plan.peak_bytes - plan.resident_bytes


@pytest.mark.slow
def test_an_lstm_whose_input_needs_no_gradient_is_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(8, 12, num_layers=2))
    case = Case(model, (torch.randn(5, 4, 8),), lambda output: output[0].square().mean())
    plain = reference(case)
    plan = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, budget="90%", time_limit=1)
    assert train(plan.apply(case.model), case).distance(plain) <= 1e-6


@pytest.mark.slow
def test_nothing_is_dropped_in_evaluation():
    torch.manual_seed(0)
    case = Case(Recurrent("GRU").eval(), (torch.randn(5, 4, 8),), None)
    plan = planner.plan(case.model, case.inputs, budget="90%", time_limit=1)
    assert train(plan.apply(case.model), case).distance(reference(case)) <= 1e-6
