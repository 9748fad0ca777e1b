"""Models whose tensors are returned in objects: distributions, and objects of the user's own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import planner
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.output_tensors import output_tensors, with_changed_tensors
from tests.support.stages import record_stages

X = torch.randn(128, 16, generator=torch.Generator().manual_seed(3))


class Holder:
    """Tensors in a list, and in a slot of a base class."""

    def __init__(self, x: torch.Tensor) -> None:
        self.parts = [x, {"half": x / 2}]
        self.me = self

    @property
    def total(self) -> torch.Tensor:
        return self.parts[0] + self.parts[1]["half"]


@dataclass(frozen=True)
class Frozen:
    inner: Any


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Hiding:
    def __init__(self, x: torch.Tensor) -> None:
        self.get = lambda: x


KINDS = {
    "normal": (lambda x: Normal(x, 1.0), lambda out: -out.log_prob(torch.zeros(16)).mean()),
    "independent": (lambda x: Independent(Normal(torch.tanh(x), x.exp()), 1),
                    lambda out: -out.log_prob(torch.zeros(16)).mean()),
    "categorical": (lambda x: Categorical(logits=x), lambda out: out.entropy().mean()),
    "holder": (Holder, lambda out: out.total.square().mean()),
    "frozen": (lambda x: Frozen([Slotted(x)]), lambda out: out.inner[0].x.square().mean()),
    "hiding": (Hiding, lambda out: out.get().square().mean()),
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.body = nn.Sequential(*(nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> Any:
        return KINDS[self.kind][0](self.body(x))


@pytest.mark.parametrize(("kind", "gives_loss", "attach"), [
    pytest.param(kind, gives_loss, attach, marks=() if (kind, gives_loss) in (
        ("normal", False), ("holder", True)) else pytest.mark.slow)
    for kind in KINDS if kind != "hiding" for gives_loss in (False, True)
    for attach in ("within", "apply")
    if kind in ("normal", "holder") or gives_loss == (attach == "within")])
def test_tensors_are_found_in_what_a_model_returns(kind, gives_loss, attach):
    plain, lose = Net(kind), KINDS[kind][1]
    arguments = {"loss_fn": lose} if gives_loss else {}
    net = copy.deepcopy(plain)
    if attach == "within":
        planner.within(net, "90%", optimizer="sgd", time_limit=1, **arguments)
    else:
        net = planner.plan(net, X, budget="90%", time_limit=1, **arguments).apply(net)
    for model in (plain, net):
        for _ in range(3):
            model.zero_grad()
            record, = record_stages([lambda model=model: lose(model(X)).backward()])
    assert all(torch.equal(mine.grad, other.grad) for mine, other
               in zip(net.parameters(), plain.parameters(), strict=True))
    assert planner.steps_of(net).planned == 3
    if attach == "within":
        held = X.nbytes + sum(parameter.nbytes for parameter in net.parameters())
        assert held + record.peak_bytes <= planner.plan_of(net).budget_bytes


def test_tensors_that_cannot_be_found_are_refused_in_true_words():
    net = planner.within(Net("hiding"), "90%", time_limit=1)
    with pytest.raises(CaptureError, match="no tensor that needs a gradient was found in what the "
                       r"model returns \(Hiding\)"):
        net(X)
    with pytest.raises(CaptureError, match="keep tensors in attributes"):
        planner.plan(Net("hiding"), X, loss_fn=KINDS["hiding"][1])


def test_objects_are_copied_where_their_tensors_change():
    x = torch.ones(3)
    before = Frozen((Holder(x), Slotted(x)))
    after = with_changed_tensors(lambda tensor: 2 * tensor, before)
    assert [tensor.sum().item() for tensor in output_tensors(after)] == [6, 3, 6]
    assert [tensor.sum().item() for tensor in output_tensors(before)] == [3, 1.5, 3]
    assert after.inner[0].me is after.inner[0]
