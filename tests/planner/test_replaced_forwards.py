"""Models whose code was changed in the instance: functions that close over the model."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.module_forward import rebound

Patch = Callable[[nn.Module], None]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
                           for _ in range(4)])


def calls_the_original(net: nn.Module) -> None:
    original = net.forward

    @functools.wraps(original)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * original(x)

    net.forward = forward  # type: ignore[assignment]


def is_a_method(net: nn.Module) -> None:
    original = net.forward

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return original(0.5 * x)

    net.forward = types.MethodType(forward, net)  # type: ignore[assignment]


def is_partial(net: nn.Module) -> None:
    def forward(module: nn.Module, scale: float, x: torch.Tensor) -> torch.Tensor:
        return type(module).forward(module, scale * x)

    net.forward = functools.partial(forward, net, 0.5)  # type: ignore[assignment]


def each_block(net: nn.Module) -> None:
    for block in net.children():
        calls_the_original(block)


def by_a_hook(net: nn.Module) -> None:
    """Hooks that add the output of another layer."""
    for block in net.children():
        first = block.get_submodule("0")
        block.register_forward_hook(lambda _, __, output, first=first: output + first.weight.mean())
        block.register_forward_pre_hook(
            lambda _, args, first=first: (args[0] + first.bias[:32], ))  # type: ignore[index]


def closes_over_a_layer(net: nn.Module) -> None:
    first = net.get_submodule("0")
    net.register_forward_hook(lambda _, __, output: output + first(output))


@pytest.mark.parametrize("patch", [calls_the_original, is_a_method, is_partial, each_block,
                                   by_a_hook, closes_over_a_layer])
@pytest.mark.parametrize("how", ["within", "apply"])
def test_a_changed_model_is_planned_as_it_runs(patch, how):
    def train(net: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        losses = []
        for number in range(3):
            torch.manual_seed(number)
            loss = net(torch.randn(256, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, net.state_dict()

    plain, net = layers(), layers()
    patch(plain)
    patch(net)
    expected, state = train(plain)
    if how == "within":
        losses, found = train(planner.within(net, "75%"))
        assert planner.status(net).planned_steps == 3
    else:
        plan = planner.plan(net, (torch.randn(256, 32),), budget="75%",
                            loss_fn=lambda output: output.square().mean())
        losses, found = train(plan.apply(net))
    assert losses == expected
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_a_forward_assigned_in_training_is_planned(caplog):
    """Nothing refers to the planned forward any more."""
    def train(net: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for number in range(4):
            if number == 2:
                net.forward = types.MethodType(
                    lambda self, x: type(self).forward(self, 0.5 * x), net)
            torch.manual_seed(number)
            net(torch.randn(256, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach() for each in net.parameters()]

    expected, net = train(layers()), planner.within(layers(), "75%")
    with caplog.at_level("WARNING", logger="planner"):
        found = train(net)
    assert all(map(torch.equal, found, expected))
    assert "its forward was replaced after planner.within was called" in caplog.text
    status = planner.status(net)
    assert status.planned_steps == status.steps == 4
    assert status.worst_peak_bytes <= status.budget_bytes


def test_a_model_that_is_deleted_or_planned_no_longer_is_not_planned_again(caplog):
    net = layers()
    net.forward = types.MethodType(lambda self, x: type(self).forward(self, x), net)
    planner.within(net, "75%")
    net(torch.randn(256, 32)).square().mean().backward()
    with caplog.at_level("WARNING", logger="planner"):
        net = planner.plan(net, (torch.randn(256, 32),), budget="75%").apply(net)
        planner.within(net, "80%")
        del net
        gc.collect()
    assert "was replaced" not in caplog.text


def test_a_part_of_a_planned_model_is_not_planned_by_itself():
    net = planner.within(layers(), "75%")
    with pytest.raises(ValueError, match="a part of a Sequential that planner"):
        planner.within(net.get_submodule("1"), "80%")
    part = layers()
    planner.within(part.get_submodule("1"), "80%")
    planner.within(part, "75%")
    part(torch.randn(256, 32)).square().mean().backward()
    assert planner.status(part).planned_steps == 1


def test_rebinding_follows_what_a_function_refers_to():
    old, new, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    copies = {id(old): new, id(old.weight): new.weight}

    def recursive(depth: int) -> list[object]:
        return [old, old.weight, *recursive(depth - 1)] if depth else []

    def unrelated() -> object:
        return other

    assert rebound(recursive, copies)(2) == [new, new.weight] * 2
    assert recursive(1)[0] is old
    assert rebound(unrelated, copies) is unrelated
    assert rebound(old.forward, copies).__self__ is new
    assert rebound(functools.partial(recursive, 1), copies)()[0] is new
    assert rebound(None, copies) is None
