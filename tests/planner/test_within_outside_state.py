"""What a model's code changes outside of the model is changed once in a step, as by plain training.

Oracle: the same loop without a plan.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner
from tests.support.training import assert_same_gradients

_COUNTED = 0


class Blocks(nn.Module):
    """Residual blocks; `change` is called with the hidden state and gives a factor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))
        self.state = SimpleNamespace(count=0)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.hidden(x))


def _global(model: nn.Module):
    class Counting(Blocks):
        def forward(self, x):
            global _COUNTED
            _COUNTED += 1
            return super().forward(x * (1 + 0.1 * _COUNTED))
    global _COUNTED
    _COUNTED = 0
    model.__class__ = Counting


def _dict(model: nn.Module):
    state = {"count": 0}

    def hook(module, args):
        state["count"] += 1
        return (args[0] * (1 + 0.1 * state["count"]),)
    model.blocks[1].register_forward_pre_hook(hook)


def _object(model: nn.Module):
    state = SimpleNamespace(count=0)

    def hook(module, args, output, state=state):
        state.count += 1
        return output * (1 + 0.1 * state.count)
    model.blocks[1].register_forward_hook(hook)


def _attribute_of_object(model: nn.Module):
    class Counting(Blocks):
        def forward(self, x):
            self.state.count += 1
            return super().forward(x * (1 + 0.1 * self.state.count))
    model.__class__ = Counting


def _tensor(model: nn.Module):
    mean = torch.zeros(64)

    def hook(module, args, output):
        mean.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output + mean
    model.blocks[1].register_forward_hook(hook)


def _numpy_generator(model: nn.Module):
    drawn = np.random.default_rng(1)

    def hook(module, args, output):
        return output * float(drawn.random())
    model.blocks[1].register_forward_hook(hook)


def _torch_generator(model):
    model.noise = torch.Generator().manual_seed(0)
    model.blocks[1].register_forward_hook(lambda module, args, output: output + 0.1 * torch.randn(
        output.shape, generator=model.noise))


@pytest.mark.parametrize("change", [_tensor, *(
    pytest.param(change, marks=pytest.mark.slow) for change in (
        _global, _dict, _object, _attribute_of_object, _numpy_generator, _torch_generator))])
def test_state_outside_of_the_model_changes_once(change):
    traces = []
    for is_planned in (False, True):
        model = Blocks()
        change(model)
        if is_planned:
            planner.within(model, "75%", time_limit=1)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for rows in (512, 512, 600, 512, 640):
            loss = model(torch.randn(rows, 32, generator=generator)).square().mean()
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
        traces.append((losses, model))
    (plain, net), (planned, other) = traces
    assert planned == plain
    assert_same_gradients(net, other)


class Logging(Blocks):
    """Keeps numbers that it reads from tensors, and decides by one; `log` is not its own."""

    def __init__(self, log: list[float]) -> None:
        super().__init__()
        self.own, self.total = [], {"count": 0, "sum": 0.0}
        self.blocks[2].register_forward_hook(
            lambda module, args, output: log.append(output.detach().std().item()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hidden(x)
        largest = x.detach().abs().max().item()
        self.own.append(largest)
        self.total["count"] += 1
        self.total["sum"] += largest
        return self.last(x if largest < 3 else 0.5 * x)


def test_numbers_that_are_read_from_tensors_are_kept_once():
    logs: list[list[float]] = [[], []]
    plain, planned = map(Logging, logs)
    planner.within(planned, "80%", time_limit=1)
    for step in range(4):
        x = (1 + step % 2) * torch.randn(256, 32)
        for model in (plain, planned):
            model.zero_grad()
            model(x).square().mean().backward()
        assert_same_gradients(planned, plain)
        assert (planned.own, planned.total, logs[1]) == (plain.own, plain.total, logs[0])


class Counting(Blocks):
    """Counts its calls, computes with the count, and reads a value in each third."""

    def __init__(self, log: list[float]) -> None:
        super().__init__()
        self.calls, self.log = 0, {"norms": log}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.hidden(x) * min(1, self.calls / 4)
        if self.calls % 3 == 0:
            self.log["norms"].append(x.detach().norm().item())
        return self.last(x)


@pytest.mark.slow
def test_values_are_learned_of_the_call_that_follows():
    logs: list[list[float]] = [[], []]
    plain, planned = map(Counting, logs)
    planner.within(planned, "80%", time_limit=1)
    for _ in range(6):
        x = torch.randn(256, 32)
        for model in (plain, planned):
            model.zero_grad()
            model(x).square().mean().backward()
        assert_same_gradients(planned, plain)
        assert planned.calls == plain.calls and logs[1] == logs[0]


@pytest.mark.parametrize("where", [pytest.param("attribute", marks=pytest.mark.slow), "list"])
def test_losses_that_a_call_leaves_elsewhere_are_planned(where):
    """Auxiliary losses of a mixture of experts, in a list of the model or of the loop."""
    class Auxiliary(Blocks):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
                self.left.append(x.square().mean())
            return self.last(x)

    nets = []
    for is_planned in (False, True):
        model = Auxiliary() if where == "attribute" else Blocks()
        model.left = []
        if where == "list":
            left = model.left

            def hook(module, args, output, left=left):
                left.append(output.square().mean())
            model.blocks[2].register_forward_hook(hook)
        if is_planned:
            planner.within(model, "85%", time_limit=1)
        nets.append(model)
    for rows in (512, 512, 600, 512):
        x, labels = torch.randn(rows, 32), torch.randint(10, (rows,))
        for model in nets:
            model.left.clear()
            loss = F.cross_entropy(model(x), labels) + 0.1 * torch.stack(model.left).mean()
            model.zero_grad()
            loss.backward()
        assert len(nets[0].left) == len(nets[1].left)
        assert_same_gradients(*nets)
    assert planner.status(nets[1]).last_reason is None


class TwoOutputs(Blocks):
    def forward(self, x):
        hidden = self.hidden(x)
        return self.last(hidden), hidden


@pytest.mark.parametrize("swapped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_backwards_through_two_outputs(swapped):
    nets = [TwoOutputs(), planner.within(TwoOutputs(), "85%", time_limit=1)]
    for rows in (1024, 1024, 1024, 1200, 1024):
        x, labels = torch.randn(rows, 32), torch.randint(10, (rows,))
        for net in nets:
            scores, hidden = net(x)
            losses = [F.cross_entropy(scores, labels), hidden.square().mean()]
            first, second = reversed(losses) if swapped else losses
            net.zero_grad()
            first.backward(retain_graph=True)
            second.backward()
        assert_same_gradients(*nets)


@pytest.mark.slow
def test_a_number_of_the_clocks_is_planned_at_each_size():
    """Code that takes another path whenever it runs has no graph for all sizes."""
    ticks = iter(range(10_000))

    class Clocked(Blocks):
        def forward(self, x):
            return super().forward(x) * (1 + next(ticks) / 10_000)

    net = planner.within(Clocked(), "85%", time_limit=1)
    for rows in (512, 512, 600):
        net.zero_grad()
        net(torch.randn(rows, 32)).square().mean().backward()
    assert planner.status(net).planned_steps == 3


def test_a_warning_does_not_break_the_graph():
    class Warns(Blocks):
        def forward(self, x):
            x = self.hidden(x)
            warnings.warn("of no use", FutureWarning, stacklevel=1)
            return self.last(x)

    model = Warns()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planner.plan(model, torch.randn(512, 32), budget="80%", time_limit=1)
    assert len(plan.spec.regions) == 1


@pytest.mark.slow
def test_a_step_that_raises_after_sizes_have_varied():
    """The loop skips a batch that the model refuses; torch gives up on code that raises."""
    class Refusing(Blocks):
        def forward(self, x):
            if self.state.count:
                raise ValueError("refused")
            return super().forward(x)

    net = planner.within(Refusing(), "75%", time_limit=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for rows in (512, 512, 600, 400, 600, 512, 256):
        net.state.count = int(rows == 400)
        try:
            net(torch.randn(rows, 32)).square().mean().backward()
        except ValueError:
            continue
        optimizer.step()
        optimizer.zero_grad()
    status = planner.status(net)
    assert (status.steps, status.planned_steps) == (6, 6)
