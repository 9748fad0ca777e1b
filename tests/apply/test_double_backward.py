"""Gradients of gradients, as a gradient penalty takes them: refused in words, with a way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


def penalty(call: Callable[[torch.Tensor], Any], of: list[torch.Tensor] | None = None
            ) -> torch.Tensor:
    """The squares of the gradients of the inputs, or of these tensors."""
    x = torch.linspace(-1, 1, 8 * 16).view(8, 16).requires_grad_(of is None)
    loss = call(x).sum()
    gradients = torch.autograd.grad(loss, [x] if of is None else of, create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in gradients)


@pytest.mark.parametrize("of_inputs", [True, False], ids=["inputs", "parameters"])
@pytest.mark.parametrize("attach", ["within", "apply"])
def test_a_gradient_penalty_is_refused_and_the_way_out_works(attach, of_inputs):
    plain = model()
    net = copy.deepcopy(plain)
    if attach == "within":
        planner.within(net, "10MB", time_limit=1)
    else:
        x = torch.zeros(8, 16, requires_grad=of_inputs)
        net = planner.plan(net, x, loss_fn=torch.sum).apply(net)
    for call in (net, lambda x: type(net).forward(net, x)):
        of = None if of_inputs else list(net.parameters())
        net.zero_grad()
        loss = penalty(call, of)
        if call is net:
            with pytest.raises(planner.CaptureError, match=r"create_graph=True.*type\(model\)"):
                loss.backward()
        else:
            loss.backward()
    penalty(plain, None if of_inputs else list(plain.parameters())).backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_graph_of_the_backward_that_nobody_differentiates_does_no_harm():
    net = planner.within(model(), "10MB", time_limit=1)
    x = torch.ones(8, 16)
    gradients = torch.autograd.grad(net(x).sum(), list(net.parameters()), create_graph=True)
    plain = model()
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
