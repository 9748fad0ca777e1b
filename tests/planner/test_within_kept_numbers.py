"""`planner.within` where layers note numbers of tensors, for a log: attributes, dicts, lists."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import planner
from planner._graph_capture.module_forward import forward_override

STEPS = 6


class Noting(nn.Module):
    """A layer that calls `note` with itself and its activations."""

    def __init__(self, note, others) -> None:
        super().__init__()
        self.note, self.others = note, others
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU())
        self.out = nn.Linear(128, 32)
        self.register_buffer("average", torch.tensor(1.0))
        self.last, self.known, self.noted = 0.0, {}, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mlp(x)
        return x + (self.note(self, h) or 1.0) * self.out(h)


class Net(nn.Module):
    def __init__(self, note, returns=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        others = []
        self.layers = nn.ModuleList(Noting(note, others) for _ in range(4))
        others += self.layers
        self.returns = returns

    def forward(self, x: torch.Tensor):
        for layer in self.layers:
            x = layer(x)
        return x if self.returns is None else self.returns(x)


def _attribute(layer, h):
    layer.last = h.mean().item()
    layer.known["last"] = int((h > 0.5).sum())


def _list(layer, h):
    layer.noted.append(h.mean().item())
    layer.noted.append(float(h.detach().std()))
    layer.known.setdefault("all", []).append(h.amax().item())


def _written_later(layer, h):
    layer.last = layer.average.item()
    layer.average.mul_(0.9).add_(h.detach().mean(), alpha=0.1)
    layer.known["average"] = layer.average.item()
    layer.average.sub_(0.01)


def _branch(layer, h):
    value = h.detach().abs().mean().item()
    layer.noted.append(value)
    layer.known["high"] = layer.known.get("high", 0) + (value > 0.2)


def _factor(layer, h):
    layer.last = h.detach().abs().amax().item()
    return 1 / layer.last


def _read_by_others(layer, h):
    layer.last = h.mean().item()
    if layer is not layer.others[0] and layer.others[0].last > 0.1:
        layer.known["seen"] = True


def _counted_list(layer, h):
    layer.noted.append(h.mean().item())
    if len(layer.noted) > 3:
        layer.noted.pop(0)


def train(net: nn.Module, budget: str | None = None) -> tuple[list, list, list[int]]:
    """What the loop sees, what the layers have noted, and compilations up to each step."""
    if budget:
        planner.within(net, budget, time_limit=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen, compiled = [], []
    for step in range(STEPS):
        x = torch.randn(512, 32, generator=torch.Generator().manual_seed(step))
        output = net(x)
        output, *others = output if isinstance(output, tuple) else (output,)
        loss = F.mse_loss(output, x.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), others))
        compiled.append(counters["stats"]["unique_graphs"])
    return seen, [(layer.last, layer.known, layer.noted) for layer in net.layers], compiled


def check(note, budget: str, returns=None) -> tuple[nn.Module, list[int]]:
    plain, net = Net(note, returns), Net(note, returns)
    seen, noted, _ = train(plain)
    seen_within, noted_within, compiled = train(net, budget)
    assert seen_within == seen
    assert noted_within == noted
    for mine, theirs in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert planner.status(net).planned_steps == STEPS
    return net, compiled


@pytest.mark.parametrize("note", [_attribute, _list, _written_later])
def test_numbers_that_are_only_kept_break_no_graph(note):
    net, compiled = check(note, "75%")
    graph, = forward_override(net).graphs
    assert len(graph.plan.spec.regions) == 1
    assert compiled[2:] == compiled[2:3] * (STEPS - 2)  # a key may be new in the second step


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("note", [_branch, _factor, _read_by_others, _counted_list])
def test_numbers_that_code_computes_with_are_right(note):
    check(note, "90%")


@pytest.mark.slow
def test_numbers_among_the_outputs():
    check(_attribute, "95%", lambda x: (x, x.mean().item(), {"n": int((x > 0).sum())}))
