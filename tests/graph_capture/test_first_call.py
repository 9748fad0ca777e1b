"""Models that change when they are called for the first time, as those of transformers do that
install hooks then: the graph breaks once, and never again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import planner
from planner.api import capture


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = layer(), layer(), layer()
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        if not self.is_ready:
            torch._dynamo.graph_break()
            self.is_ready = True
        x = x + self.second(x)
        return (x + self.third(x)).square().mean()


class LateInALoop(Late):
    """By itself torch.compile gives up on a whole function that breaks within a loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in (self.first, self.second, self.third):
            if not self.is_ready:
                torch._dynamo.graph_break()
                self.is_ready = True
            x = x + inner(x)
        return x.square().mean()


def test_the_plan_is_that_of_all_later_calls():
    model, batch = Late(), (torch.randn(256, 16),)
    assert len(capture(model, batch).base.graph.regions) == 1
    plan = planner.plan(model, batch, budget="80%", time_limit=2)
    with pytest.raises(planner.PlanMismatch, match="call it once before the plan is applied"):
        plan.apply(copy.deepcopy(model))(*batch)
    model(*batch)
    plan.apply(model)(*batch).backward()
    assert planner.verify(model, plan, batch).ok
    with pytest.raises(planner.PlanMismatch, match=r"Make a plan for them$"):
        applied = plan.apply(model)
        applied(*batch)
        applied(torch.randn(512, 16))


def test_a_break_in_a_loop_of_the_first_call_is_planned():
    batch = (torch.randn(256, 16),)
    plan = planner.plan(LateInALoop(), batch, budget="80%", time_limit=2)
    first = plan.apply(LateInALoop())
    first(*batch).backward()
    assert planner.steps_of(first).planned == 1
    called = LateInALoop()
    called(*batch)
    plan.apply(called)(*batch).backward()
