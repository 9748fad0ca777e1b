"""What planning leaves behind: nothing of a capture, however many plans are made."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.dynamo.record import Recording


def train(net: nn.Module, sizes: list[int]) -> None:
    for size in sizes:
        net(torch.ones(size, 8)).sum().backward()


@pytest.mark.parametrize("how", ["within", "replan"])
def test_captures_are_let_go(how):
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    attached = net
    if how == "within":
        planner.within(net, "10MB", time_limit=1)
    else:
        def plan(model: nn.Module, inputs: object) -> planner.Plan:
            return planner.plan(model, inputs, loss_fn=torch.sum)

        attached = plan(net, torch.ones(2, 8)).apply(net, replan=plan)
    train(attached, [2, 4, 6])
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Recording]
