"""`planner.within` in loops that change how autograd works, or plan inside of the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import planner

Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
                           for _ in range(4)])


def under_anomaly_mode(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.set_detect_anomaly(True):
        return net(x).square().mean()


def under_a_checkpoint(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(net, x, use_reentrant=False).square().mean()


def with_another_planned(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = net(x)
    planner.plan(nn.Linear(32, 32), (x,), budget="100%", time_limit=0.5)
    planner.memory(nn.Linear(32, 32), (x,))
    return out.square().mean()


def trained(net: nn.Module, call: Call) -> tuple[list[float], list[torch.Tensor]]:
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.01), []
    for number in range(3):
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = call(net, torch.randn(128, 32))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad for p in net.parameters()]


@pytest.mark.filterwarnings("ignore:saved-tensor hooks", "ignore:Anomaly Detection")
@pytest.mark.parametrize("call", [
    under_anomaly_mode, under_a_checkpoint,
    pytest.param(with_another_planned, marks=pytest.mark.slow)])
def test_a_step_that_is_disturbed_is_planned(call, monkeypatch):
    # As in a process that has planned nothing yet.
    monkeypatch.setattr("planner._graph_capture.torch_compat.memory.GradientsInPlace._alone", None)
    want, plain = trained(layers(), call)
    net = planner.within(layers(), "75%", time_limit=0.5)
    found, gradients = trained(net, call)
    status = planner.status(net)
    assert found == want
    assert all(map(torch.equal, gradients, plain))
    assert status.planned_steps == status.steps == 3
    assert status.worst_peak_bytes <= status.budget_bytes


class Propagation(nn.Module):
    """A graph convolution with a sparse adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(adjacency, self.linear(x))


def test_sparse_inputs_are_refused_in_words():
    net = planner.within(Propagation(), "80%")
    with pytest.raises(planner.CaptureError, match="an input is a sparse tensor"):
        net(torch.randn(4, 8), torch.eye(4).to_sparse())
