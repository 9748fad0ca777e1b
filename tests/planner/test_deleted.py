"""A model that is deleted goes, though torch caches what was compiled of it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import planner
from planner.torch_compile_backend import checkpoint_planner

X = torch.randn(512, 64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


def make() -> nn.Module:
    return nn.Sequential(Block(), Block())


def applied() -> nn.Module:
    plan = planner.plan(make(), (X,), budget="95%", loss_fn=lambda output: output.sum())
    return plan.apply(make())


@pytest.mark.parametrize("attached", [
    lambda: planner.within(make(), "95%", time_limit=1),
    lambda: planner.within(make(), "95%", time_limit=1, regions="blocks"), applied,
], ids=["within", "within, by blocks", "apply"])
def test_a_deleted_model_is_gone(attached):
    model = attached()
    for _ in range(2):
        model(X).sum().backward()
    assert planner.steps_of(model).planned == 2
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


def test_a_model_deleted_under_the_one_line_backend_is_gone():
    for _ in range(2):  # the second model's parameters may be where the first one's were
        plain = make()
        model = copy.deepcopy(plain)
        model.compile(backend=checkpoint_planner, options={"budget": "95%", "inductor": False})
        model(X).sum().backward()
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(2):
                model(X).sum().backward()
        for _ in range(3):
            plain(X).sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        del model, mine
        gc.collect()
        assert not any(parameter() is not None for parameter in parameters)
