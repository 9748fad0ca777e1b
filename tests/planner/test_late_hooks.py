"""Hooks, layers and parametrizations that come after a plan take effect, or are said."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import planner

X = torch.randn(128, 16, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def another_block(net: Net) -> None:
    torch.manual_seed(1)
    net.blocks[1] = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


CHANGES = {
    "forward": lambda net: net.blocks[1].up.register_forward_hook(
        lambda module, args, output: 2 * output),
    "forward, of a block": lambda net: net.blocks[1].register_forward_hook(
        lambda module, args, output: 2 * output),
    "before the forward": lambda net: net.blocks[1].up.register_forward_pre_hook(
        lambda module, args: (2 * args[0],)),
    "backward": lambda net: net.blocks[1].up.register_full_backward_hook(
        lambda module, inputs, outputs: (2 * inputs[0],)),
    "parametrization": lambda net: parametrize.register_parametrization(
        net.blocks[1].up, "weight", Twice()),
    "another block": another_block,
}


def gradients(net: nn.Module) -> list[torch.Tensor]:
    net.zero_grad()
    net(X).square().mean().backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


def equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ones, others))


@pytest.mark.parametrize(("change", "regions"), [
    ("forward", "model"),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ("backward", "model"), ("before the forward", "model"), ("parametrization", "model"),
        ("another block", "model"),
        ("forward, of a block", "blocks"), ("backward", "blocks")))])
def test_within_plans_a_changed_model_anew(change, regions):
    plain = Net()
    net = planner.within(copy.deepcopy(plain), "90%", regions=regions, optimizer="sgd",
                         time_limit=1)
    for _ in range(2):
        assert equal(gradients(net), gradients(plain))
    for model in (plain, net):
        CHANGES[change](model)
    for _ in range(2):
        assert equal(gradients(net), gradients(plain))
    assert planner.steps_of(net).planned == 4


def test_an_applied_plan_refuses_a_hook_that_changes_its_graph():
    plain = Net()
    net = planner.plan(plain, X, budget="90%", time_limit=1).apply(copy.deepcopy(plain))
    assert equal(gradients(net), gradients(plain))
    hook = CHANGES["forward"](net)
    with pytest.raises(planner.PlanMismatch, match="Hooks of its submodules have come or gone"):
        gradients(net)
    hook.remove()
    assert equal(gradients(net), gradients(plain))


def test_hooks_of_blocks_run_around_their_plans_and_are_warned_of():
    plain = Net()
    net = planner.plan(plain, X, budget="90%", regions="blocks", time_limit=1).apply(
        copy.deepcopy(plain))
    assert equal(gradients(net), gradients(plain))
    for model in (plain, net):
        CHANGES["forward, of a block"](model)
    with pytest.warns(UserWarning, match="what they allocate is not in it"):
        found = gradients(net)
    assert equal(found, gradients(plain))
    assert equal(gradients(net), gradients(plain))


def test_with_hooks_for_all_modules_nothing_is_planned():
    net = planner.within(Net(), "90%", optimizer="sgd", time_limit=1)
    called = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: called.append(module))
    try:
        with pytest.warns(UserWarning, match="hooks for all modules"):
            gradients(net)
    finally:
        hook.remove()
    assert net.blocks[0].up in called
    gradients(net)
    assert (planner.steps_of(net).planned, planner.steps_of(net).unplanned) == (1, 1)


def test_the_backend_warns_of_hooks_that_torch_does_not_look_at():
    torch._dynamo.reset()
    net = Net()
    compiled = torch.compile(net, backend="checkpoint_planner", options={
        "budget": "90%", "inductor": False, "optimizer": "sgd", "time_limit": 1})
    gradients(compiled)
    gradients(compiled)
    CHANGES["forward"](net)
    with pytest.warns(UserWarning, match="without looking at them"):
        gradients(compiled)
    gradients(compiled)  # another warning would be an error
    torch._dynamo.reset()
    assert equal(gradients(compiled), gradients(net))
