"""Numbers and texts among the arguments that differ from call to call."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import planner
from tests.support.training import assert_same_gradients


class Weighted(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        """`breaks`: its graph breaks behind the blocks."""
        super().__init__()
        torch.manual_seed(0)
        self.breaks = breaks
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))

    def forward(self, x, weight=1.0, files=(), step=0, kept=1.0):
        if kept < 1:
            x = x[:int(kept * 256)]
        for block in self.blocks:
            x = x + block(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return (x * weight).exp()


def _train(calls, *, breaks=False):
    """Train a plain and a planned model by calls with these keyword arguments; returns the status.
    """
    plain = Weighted(breaks=breaks)
    net = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    for number, call in enumerate(calls):
        x = torch.randn(384 if number % 3 == 2 else 256, 32)
        for each in (plain, net):
            each.zero_grad()
            each(x, **call).square().mean().backward()
        assert_same_gradients(net, plain)
    return planner.status(net)


@pytest.mark.parametrize(("varied", "breaks"), [
    (lambda number: {"files": [f"{number}.png", f"{number + 1}.png"]}, False),
    pytest.param(lambda number: {"step": number}, True, marks=pytest.mark.slow)])
def test_what_no_code_reads_makes_no_plan(varied, breaks, caplog):
    expected = _train([{}] * 8, breaks=breaks).plans
    with caplog.at_level(logging.WARNING, "planner"):
        assert _train(map(varied, range(8)), breaks=breaks).plans <= expected + 1
    assert "the argument" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_a_number_that_is_read_makes_no_plan_of_its_own(breaks, caplog):
    expected = _train([{}] * 8, breaks=breaks).plans
    with caplog.at_level(logging.WARNING, "planner"):
        status = _train(({"weight": 0.9 ** number} for number in range(8)), breaks=breaks)
    assert status.last_reason is None
    assert status.plans <= expected + 2
    assert "the argument" not in caplog.text


@pytest.mark.slow
def test_a_number_that_decides_a_size_is_told_once(caplog):
    with caplog.at_level(logging.WARNING, "planner"):
        status = _train({"kept": 0.9 ** number} for number in range(1, 7))
    assert status.last_reason is None
    assert caplog.text.count("the argument kept has other values from call to call") == 1


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_two_values_that_take_turns_have_a_graph_each(breaks):
    status = _train(({"weight": (0.5, 2.0)[number % 2]} for number in range(8)), breaks=breaks)
    assert status.last_reason is None


class Packed(nn.Module):
    """Is called with the starts of documents, as kernels of other devices need them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))

    def forward(self, x, *, starts=None, reads=False):
        if reads:
            x = x + starts.sum()
        return self.layers(x).square().mean()


@pytest.mark.slow
def test_an_argument_that_no_op_reads_may_have_any_size(caplog):
    caplog.set_level(logging.INFO, logger="planner")
    net, x = planner.within(Packed(), "90%", time_limit=1), torch.randn(64, 32)

    def plans_after(count: int, **kwargs: bool) -> int:
        net(x, starts=torch.arange(count), **kwargs).backward()
        return planner.status(net).plans

    plans = [plans_after(count) for count in (5, 5, 5, 7, 3, 9)]
    assert plans[2] == plans[-1]
    assert "symbolic" not in caplog.text
    # Where the code reads it, its sizes count.
    plain = Packed()
    plain.load_state_dict(net.state_dict())
    net.zero_grad()
    for count in (4, 6):
        for each in (plain, net):
            each(x, starts=torch.arange(count), reads=True).backward()
    assert_same_gradients(plain, net)


class Headed(nn.Module):
    """A body with a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)))
        self.heads = nn.ModuleList(nn.Linear(32, count) for count in (10, 3, 1))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.heads[task](self.body(x))


@pytest.mark.slow
@pytest.mark.parametrize("calls", [((0, 200), (1, 64), (2, 128)), ((0, 200), (1, 64))])
def test_calls_of_one_step_with_a_number_and_a_size_each_are_planned_once(calls):
    torch.manual_seed(0)
    plain = Headed()
    net = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    plans = []
    for _ in range(8):
        batches = [(torch.randn(count, 32), task) for task, count in calls]
        for each in (plain, net):
            each.zero_grad()
            sum(each(*batch).square().mean() for batch in batches).backward()
        assert all(mine.grad is theirs.grad or torch.equal(mine.grad, theirs.grad) for mine, theirs
                   in zip(net.parameters(), plain.parameters(), strict=True))
        plans.append(planner.status(net).plans)
    assert plans[4:] == plans[3:4] * 4
