"""Plans where the loop or the model changes numbers that the model's code reads: temperatures,
weights of terms, counters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import planner

STEPS = 7


class Varying(nn.Module):
    """A layer that calls `combine` with itself, its input and its branch."""

    def __init__(self, combine) -> None:
        super().__init__()
        self.combine = combine
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(),
                                 nn.Linear(128, 32))
        self.tau, self.calls, self.known = 1.0, 0, {"weight": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(self, x, self.mlp(x))


class Net(nn.Module):
    def __init__(self, combine) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Varying(combine) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _temperature(layer, x, h):
    return x + torch.softmax(h / (layer.tau + 0.1), -1)


def _computed(layer, x, h):
    return x + h * (1 - layer.tau) + h.sin() * min(layer.tau, 0.97) * round(layer.tau, 1)


def _of_a_dict(layer, x, h):
    return x + h * layer.known["weight"]


def _annealed_by_itself(layer, x, h):
    layer.tau *= 0.99
    return x + h * layer.tau


def _counter(layer, x, h):
    layer.calls += 1
    return x + h * min(1.0, layer.calls / 100)


def _gumbel(layer, x, h):
    return x + F.gumbel_softmax(h, tau=layer.tau, hard=True) * h


def _other_branch(layer, x, h):
    layer.calls += 1
    if layer.calls % 2 == 0:
        h = h.tanh()
    return x + h * layer.tau


def _text(layer, x, h):
    layer.known["text"] = f"{layer.tau:.2f}"
    return x + h * layer.tau


def _size(layer, x, h):
    count = int(layer.tau * 64)
    return torch.cat([x[:count] + h[:count], x[count:]])


def train(net: nn.Module, call, rows, steps=STEPS) -> tuple[list, list, list[int]]:
    """What the loop sees, what the layers know after it, and compilations up to each step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1)
    seen, compiled = [], []
    for step in range(steps):
        for layer in net.layers:
            if layer.combine is not _annealed_by_itself:
                layer.tau = 1 - step / 50
            layer.known["weight"] = 1 + step
        x = torch.randn(rows[step % len(rows)], 32,
                        generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(call(x), x.roll(1))
        loss.backward()
        seen.append((loss.item(), [each.grad.double().sum().item() for each in net.parameters()],
                     torch.get_rng_state().sum().item()))
        optimizer.step()
        optimizer.zero_grad()
        compiled.append(counters["stats"]["unique_graphs"])
    return seen, [(layer.tau, layer.calls, layer.known) for layer in net.layers], compiled


@pytest.mark.compat
@pytest.mark.parametrize(("combine", "rows"), [
    *((combine, (256,)) for combine in (_temperature, _computed, _annealed_by_itself)),
    *(pytest.param(combine, (256, 192, 128), marks=pytest.mark.slow)
      for combine in (_of_a_dict, _counter, _gumbel))])
def test_a_number_that_changes_is_an_input_of_the_graph(combine, rows):
    plain = train(net := Net(combine), net, rows)
    net = Net(combine)
    planner.within(net, "70%", time_limit=1)
    found = train(net, net, rows)
    assert found[:2] == plain[:2]
    compiled = found[2]
    assert compiled[3:] == compiled[3:4] * (STEPS - 3)
    status = planner.status(net)
    assert status.planned_steps == STEPS
    assert status.worst_peak_bytes <= status.plan.budget_bytes


@pytest.mark.parametrize("combine", [_temperature, _annealed_by_itself, _counter])
def test_a_plan_serves_numbers_that_change(combine):
    plain = train(net := Net(combine), net, (256,))
    net = Net(combine)
    plan = planner.plan(net, (torch.randn(256, 32),), budget="70%", time_limit=1)
    found = train(net, plan.apply(net), (256,))
    assert found[:2] == plain[:2]
    assert found[2][2:] == found[2][2:3] * (STEPS - 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:parts of the model are compiled anew")
@pytest.mark.parametrize("combine", [_other_branch, _text, _size])
def test_numbers_that_decide_are_constants(combine):
    plain = train(net := Net(combine), net, (256,))
    net = Net(combine)
    planner.within(net, "75%", time_limit=1)
    assert train(net, net, (256,))[:2] == plain[:2]


@pytest.mark.slow
def test_a_graph_that_a_number_rules_out_is_compiled_once():
    net = Net(_other_branch)
    planner.within(net, "75%", time_limit=1)
    compiled = train(net, net, (256,), steps=12)[2]
    assert compiled[-3:] == compiled[-1:] * 3


@pytest.mark.parametrize("p", [0.1, 0.15, 0.09, 1 - 0.99**10])
def test_dropout_has_the_bits_of_the_plain_step(p):
    """For some `p`, what is kept divided by 1 - p is not what is kept times 1 / (1 - p)."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Dropout(p), nn.GELU())
                          for _ in range(4)))
    x = torch.randn(256, 32)

    def step(net: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        output = net(x)
        output.square().sum().backward()
        return [output, *(each.grad for each in net.parameters())]

    expected = step(copy.deepcopy(net))
    for found, like in zip(step(planner.within(net, "70%", time_limit=1)), expected, strict=True):
        assert torch.equal(found, like)
