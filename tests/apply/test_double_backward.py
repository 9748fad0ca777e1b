"""Gradients of gradients, as a gradient penalty takes them, are those of the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import planner


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(),
                         nn.Dropout(dropout), nn.Linear(32, 1))


def penalty(net: nn.Module, *, of_inputs: bool) -> torch.Tensor:
    """The squares of the gradients of the inputs, or of the parameters."""
    x = torch.linspace(-1, 1, 8 * 16).view(8, 16).sin().requires_grad_(of_inputs)
    of = [x] if of_inputs else list(net.parameters())
    gradients = torch.autograd.grad(net(x).square().sum(), of, create_graph=True)
    return sum(gradient.square().sum() for gradient in gradients)


@pytest.mark.filterwarnings("ignore:.*differentiated again")
@pytest.mark.parametrize("of_inputs", [True, False], ids=["inputs", "parameters"])
@pytest.mark.parametrize("attach", ["within", "apply"])
def test_a_gradient_penalty_is_that_of_the_plain_model(attach, of_inputs):
    plain = model()
    net = copy.deepcopy(plain)
    if attach == "within":
        planner.within(net, "10MB", time_limit=1)
    else:
        x = torch.randn(8, 16, requires_grad=of_inputs)
        net = planner.plan(net, x, loss_fn=lambda y: y.square().sum()).apply(net)
    for step in range(3):
        for each in (plain, net):
            each.zero_grad()
            penalty(each, of_inputs=of_inputs).backward()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is None:
                continue
            # What the planned call adds up in one sum, its second computation does in two.
            assert (mine.grad - theirs.grad).norm() <= 1e-4 * theirs.grad.norm()
            assert attach == "apply" or step == 0 or torch.equal(mine.grad, theirs.grad)
        for mine, theirs in zip(net.buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs)
    if attach == "within":
        status = planner.status(net)
        assert status.calls == 3 and "run as they are written" in status.last_reason


def test_it_is_said_that_the_plan_does_not_hold_it():
    net = planner.within(model(), "10MB", time_limit=1)
    with pytest.warns(UserWarning, match="differentiated again.*not in the plan"):
        penalty(net, of_inputs=True)
    with pytest.warns(UserWarning, match="run as they are written"):
        penalty(net, of_inputs=True)


@pytest.mark.filterwarnings("ignore:.*differentiated again")
def test_random_numbers_that_are_gone_are_refused_and_the_way_out_works():
    net = planner.within(model(dropout=0.5), "10MB", time_limit=1)
    loss = penalty(net, of_inputs=True)
    with pytest.raises(planner.CaptureError, match=r"create_graph=True.*type\(model\)"):
        loss.backward()
    type(net).forward(net, torch.randn(8, 16)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*differentiated again")
def test_a_graph_of_the_backward_that_nobody_differentiates_does_no_harm():
    net = planner.within(model(), "10MB", time_limit=1)
    x = torch.ones(8, 16)
    gradients = torch.autograd.grad(net(x).sum(), list(net.parameters()), create_graph=True)
    plain = model()
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
