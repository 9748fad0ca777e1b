"""Calls that are no training step run as the model is written, and the plan holds afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import planner
from tests.support.stages import record_stages

X = torch.randn(256, 16, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def count_flops(net: nn.Module) -> None:
    with FlopCounterMode(display=False):
        net(X).sum().backward()


def dual(net: nn.Module) -> None:
    with forward_ad.dual_level():
        net(forward_ad.make_dual(X, X))


def per_sample(net: nn.Module) -> None:
    values = {name: value.detach() for name, value in net.named_parameters()}
    vmap(grad(lambda given, x: functional_call(net, given, (x[None],)).square().mean()),
         in_dims=(None, 0))(values, X)


def with_vjp(net: nn.Module) -> None:
    output, pull = vjp(net, X)
    pull(output)


FOREIGN: dict[str, tuple[Callable[[Any], object], str | None]] = {
    "flops": (count_flops, "dispatch mode"),
    "per sample": (per_sample, "transform of torch.func"),
    "jvp": (lambda net: jvp(net, (X,), (X,)), "transform of torch.func"),
    "vjp": (with_vjp, "transform of torch.func"),
    "dual numbers": (dual, "forward-mode"),
    "export": (lambda net: torch.export.export(net, (X,)), None),
}
PARAMETERS = [
    pytest.param(name, attach, marks=() if name in ("per sample", "export") else pytest.mark.slow)
    for name in FOREIGN for attach in ("within", "apply", "backend")
    # Of the others torch.compile says nothing to its backend, and gives up on the code for good.
    if attach != "backend" or name == "dual numbers"]


def attached(net: nn.Module, attach: str) -> nn.Module:
    if attach == "within":
        return planner.within(net, "85%", optimizer="sgd", time_limit=1)
    if attach == "apply":
        return planner.plan(net, X, budget="85%", optimizer="sgd", time_limit=1).apply(net)
    torch._dynamo.reset()
    return torch.compile(net, backend="checkpoint_planner", options={
        "budget": "85%", "inductor": False, "optimizer": "sgd", "time_limit": 1})


def peaks(net: nn.Module, *, steps: int = 1) -> list[int]:
    """What each training step holds at most above what there was before it."""
    found = []
    for _ in range(steps):
        net.zero_grad()
        record, = record_stages([lambda: net(X).square().mean().backward()])
        found.append(record.peak_bytes)
    return found


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("name", "attach"), PARAMETERS)
def test_a_foreign_call_leaves_the_plan_as_it_was(name, attach):
    call, said = FOREIGN[name]
    plain = Net()
    run = attached(net := copy.deepcopy(plain), attach)
    before = peaks(run, steps=3)[-1]
    if said is None:
        call(run)
    else:
        with pytest.warns(UserWarning, match=said):
            call(run)
    plain_peak = peaks(plain, steps=2)[-1]
    assert peaks(run, steps=2)[-1] == before < plain_peak
    assert all(torch.equal(mine.grad, other.grad) for mine, other
               in zip(net.parameters(), plain.parameters(), strict=True))
    if attach != "backend":
        counts = planner.steps_of(run)
        assert (counts.planned, counts.unplanned) == (5, int(said is not None))


@pytest.mark.parametrize("begins_with_it", [True, False])
def test_the_first_call_may_be_a_foreign_one_or_under_anomaly_mode(begins_with_it):
    net = planner.within(Net(), "85%", time_limit=1)
    if begins_with_it:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            net(X).square().mean().backward()
    else:
        with pytest.warns(UserWarning, match="transform of torch.func"):
            per_sample(net)
    peaks(net, steps=2)
    assert planner.steps_of(net).planned == 3 - (not begins_with_it)


@pytest.mark.filterwarnings("ignore:saved-tensor hooks")
@pytest.mark.parametrize("use_reentrant", [
    False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_within_a_budget_may_be_checkpointed(use_reentrant):
    plain, net = Net(), planner.within(Net(), "85%", time_limit=1)
    x = X.clone().requires_grad_()
    for model in (plain, net):
        for _ in range(3):
            model.zero_grad()
            checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()
    assert all(torch.equal(mine.grad, other.grad) for mine, other
               in zip(net.parameters(), plain.parameters(), strict=True))
    assert planner.steps_of(net).unplanned == 0
