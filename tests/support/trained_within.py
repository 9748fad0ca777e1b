"""Training by a plain loop, with a budget and without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from tests.support.stages import record_stages

STEPS = 3


def train(model: nn.Module, inputs: tuple[Any, ...] | dict[str, Any]
          ) -> tuple[list[float], list[int]]:
    """Return the losses, and the peak of each step with parameters, buffers and inputs."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    losses: list[float] = []

    def step() -> None:
        output = model(*args, **kwargs)
        loss = output.loss if hasattr(output, "loss") else output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    records = record_stages([step] * STEPS)
    tensors = {t.data_ptr(): t.nbytes for t in (
        *model.parameters(), *model.buffers(), *args, *kwargs.values())}
    return losses, [sum(tensors.values()) + record.peak_bytes for record in records]


def check(make: Callable[[], nn.Module], inputs: tuple[Any, ...] | dict[str, Any],
          share: float = 0.8, *, exact: bool = True) -> nn.Module:
    """Train with and without a budget; return the model that was trained within it."""
    torch.manual_seed(0)
    plain = make().train()
    model = copy.deepcopy(plain)
    losses, peaks = train(plain, inputs)
    budget = int(share * max(peaks))
    planner.within(model, budget, time_limit=1)
    found, measured = train(model, inputs)
    assert found == (losses if exact else pytest.approx(losses, rel=1e-5))
    assert max(measured) <= budget
    assert planner.steps_of(model).planned == STEPS
    return model
