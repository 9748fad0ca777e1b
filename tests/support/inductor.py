"""A small model with dropout, and its training step, for plans that Inductor runs."""

import torch
from torch import nn

from planner._graph_capture.memory.allocator import record_peak
from planner.search.planning import Effort

EFFORT = Effort(time_limit=4.0)


def make_model(*, dropout=0.2, width=32, layers=3):
    torch.manual_seed(0)
    stack = []
    for _ in range(layers):
        stack += [nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout),
                  nn.Linear(4 * width, width)]
    return nn.Sequential(*stack)


def batch(width=32):
    return torch.randn(256, width, generator=torch.Generator().manual_seed(1))


def loss_of(output):
    return output.square().mean()


def budget_at(prepared, default, fraction):
    net = default.peak_bytes - prepared.resident_bytes
    return prepared.resident_bytes + int(fraction * net)


INPUT = batch()
"""Resident: made before a step is measured."""


def step(model, seed=3):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = model(INPUT)  # alive to the end of the step, as in a training loop
    loss = loss_of(output)
    loss.backward()
    return loss.detach()


def gradient(model):
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def measured_peak(model):
    step(model)
    model.zero_grad(set_to_none=True)
    return record_peak(lambda: step(model), "cpu").peak_bytes
