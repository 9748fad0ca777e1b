"""Models that write into what they are called with, and hooks that see all optimizers."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import planner
from tests.support.stages import record_stages


class Encoder(nn.Module):
    """Adds its results to its only argument and returns that."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_object = kind is SimpleNamespace
        self.layers = nn.Sequential(*[nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.LayerNorm(32))
            for _ in range(3)])

    def forward(self, features: Any) -> Any:
        values = vars(features) if self.is_object else features
        values["tokens"] = self.layers(values["x"])
        values["pooled"] = (values["tokens"] * values["mask"][..., None]).sum(1)
        return features


def train(net: nn.Module, kind: type) -> tuple[list[float], list[int]]:
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.01), []

    def step() -> None:
        torch.manual_seed(len(losses))
        optimizer.zero_grad()
        features = net(kind(x=torch.randn(16, 16, 32), mask=torch.ones(16, 16)))
        pooled = features.pooled if kind is SimpleNamespace else features["pooled"]
        del features
        loss = pooled.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    resident = sum(p.nbytes for p in net.parameters())
    return losses, [resident + record.peak_bytes for record in record_stages([step] * 3)]


@pytest.mark.parametrize("kind", [
    dict, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (UserDict, SimpleNamespace))])
def test_a_model_writes_into_its_arguments(kind):
    plain, net = Encoder(kind), Encoder(kind)
    losses, peaks = train(plain, kind)
    planner.within(net, "80%", time_limit=2)
    found, measured = train(net, kind)
    assert found == losses
    plan = planner.plan_of(net)
    assert plan.baseline_peak_bytes == pytest.approx(max(peaks[1:]), rel=0.01)
    assert max(measured[1:]) <= plan.budget_bytes
    assert all(torch.equal(mine, other) for mine, other
               in zip(net.state_dict().values(), plain.state_dict().values(), strict=True))


def test_planning_calls_no_hooks_of_all_optimizers():
    seen = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        planner.plan(nn.Linear(8, 8), (torch.randn(4, 8),), optimizer="adamw")
    finally:
        handle.remove()
    assert not seen
