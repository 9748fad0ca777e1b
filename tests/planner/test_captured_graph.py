"""Graphs captured by Dynamo, run under the schedule with the lowest peak."""

import gc
import weakref

import pytest
import torch
from torch import nn

from planner._graph_capture.memory.allocator import record_peak
from planner.captured_graph import with_least_memory

pytestmark = pytest.mark.compat


class BreakingLayer(nn.Module):
    """Dynamo breaks its graph within, and runs the same parts for each layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        x = torch.tanh(self.first(x).exp())
        torch._dynamo.graph_break()
        return x + torch.tanh(self.second(x)).repeat(1, 4)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(model):
    return torch.compile(model, backend=lambda module, inputs: with_least_memory(module))


def gradient(call, model, x):
    model.zero_grad()
    torch.manual_seed(3)
    call(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_layers_that_share_a_graph_have_parameters_of_their_own():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(BreakingLayer(), nn.Linear(128, 32)) for _ in range(3)))
    call, x = compiled(model), torch.randn(4, 32)
    for _ in range(2):
        assert torch.equal(gradient(call, model, x), gradient(model, model, x))


def test_less_is_held_at_every_size():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (
        nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))))
    call = compiled(model)
    for size in (256, 64, 512):
        x = torch.randn(size, 32)
        assert torch.equal(gradient(call, model, x), gradient(model, model, x))
        peaks = [record_peak(lambda step=step, x=x: gradient(step, model, x), "cpu").peak_bytes
                 for step in (call, model)]
        assert peaks[0] < peaks[1]


def test_a_deleted_model_is_gone():
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
    gradient(compiled(model), model, torch.randn(4, 32))
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


def test_without_gradients_it_runs_plainly():
    model, x = nn.Linear(32, 32), torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(compiled(model)(x), model(x))
