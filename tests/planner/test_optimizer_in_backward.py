"""Gradients that hooks of parameters use and free as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from tests.support.stages import record_stages

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01), "adamw": lambda p: torch.optim.AdamW(p, 0.001)}


class Tied(nn.Module):
    """Its first and its last weight are one; blocks between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
                                    for _ in range(4))
        self.ends = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.ends
        for block in self.blocks:
            x = x + block(x)
        return (x @ self.ends.T).square().mean()


def hooked(model: nn.Module, kind: str = "sgd") -> tuple[nn.Module, list[str]]:
    """The model with a hook for each parameter that steps and frees, and what these have run for.
    """
    ran: list[str] = []
    for name, parameter in model.named_parameters():
        optimizer = OPTIMIZERS[kind]([parameter])

        def use(p: torch.Tensor, name: str = name,
                optimizer: torch.optim.Optimizer = optimizer) -> None:
            ran.append(name)
            optimizer.step()
            p.grad = None

        parameter.register_post_accumulate_grad_hook(use)
    return model, ran


def made() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def batch() -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def peak(model: nn.Module, at_end: Callable[[], object] = lambda: None) -> int:
    """Most bytes above those before, in a step that is not the first ones."""
    x = batch()

    def step() -> None:
        model(x).backward()
        at_end()

    for _ in range(2):
        step()
    return record_stages([step])[0].peak_bytes


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_predicted_is_measured(kind: str) -> None:
    plan = planner.plan(made(), batch(), optimizer=kind, optimizer_in_backward=True,
                        hold_output=False)
    plain, ran = hooked(made(), kind)
    assert peak(plain) == plan.baseline_peak_bytes - plan.resident_bytes
    planned, ran_planned = hooked(made(), kind)
    assert peak(plan.apply(planned)) == plan.peak_bytes - plan.resident_bytes
    assert sorted(ran) == sorted(ran_planned)
    assert plan.peak_bytes < planner.plan(made(), batch(), optimizer=kind,
                                          hold_output=False).peak_bytes
    for mine, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_one_region_hands_all_gradients_over() -> None:
    plan = planner.plan(made(), batch(), optimizer="adamw", optimizer_in_backward=True,
                        hold_output=False, regions="model")
    applied = plan.apply(hooked(made(), "adamw")[0])
    assert peak(applied) == plan.peak_bytes - plan.resident_bytes


def test_memory_counts_steps_in_the_backward() -> None:
    report = planner.memory(made(), batch(), optimizer="adamw", optimizer_in_backward=True)
    plan = planner.plan(made(), batch(), optimizer="adamw", optimizer_in_backward=True,
                        hold_output=False)
    assert report.peak_bytes == plan.baseline_peak_bytes
    assert report.steady["optimizer step"].memory.gradients == 0


@pytest.mark.parametrize("kind", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_within_the_peak_of_the_plain_step(kind: str) -> None:
    plain, ran = hooked(made(), kind)
    limit = planner.memory(made(), batch(), optimizer=kind, optimizer_in_backward=True).peak_bytes
    model, ran_within = hooked(made(), kind)
    planner.within(model, limit)
    measured = peak(model)
    peak(plain)
    plan = planner.plan_of(model)
    # What ops of the optimizer's allocate for scalars is not seen in a hook.
    assert plan is not None and measured <= plan.peak_bytes - plan.resident_bytes + 64
    assert abs(plan.baseline_peak_bytes - limit) < 64
    assert sorted(ran) == sorted(ran_within)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert planner.status(model).steps == planner.status(model).planned_steps == 3


class Idle(torch.optim.Optimizer):
    """A trainer's optimizer where hooks of the parameters make the steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.slow
def test_state_of_hooks_counts_beside_a_given_optimizer() -> None:
    limit = planner.memory(made(), batch(), optimizer="adamw",
                           optimizer_in_backward=True).peak_bytes
    model, _ = hooked(made(), "adamw")
    idle = Idle(model.parameters())
    planner.within(model, limit, optimizer=idle)
    measured = peak(model, idle.step)
    plan = planner.plan_of(model)
    assert plan is not None and measured <= plan.peak_bytes - plan.resident_bytes + 64
    assert plan.memory["optimizer"] >= 2 * plan.memory["parameters"]


def test_hooks_that_keep_gradients_are_seen() -> None:
    model = made()
    seen: list[float] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: seen.append(float(p.grad.norm())))  # type: ignore[union-attr]
    planner.within(model, "100%", optimizer="sgd")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch()).backward()
        optimizer.step()
    plan = planner.plan_of(model)
    assert plan is not None and plan.memory["gradients"] > 0
    assert len(seen) == 3 * len([*model.parameters()])


def test_gradients_of_earlier_parameters_are_freed_by_later_hooks() -> None:
    """As LOMO does: each hook uses what came before."""
    model = made()

    def use(gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
                    parameter.grad = None
        return gradient

    for parameter in model.parameters():
        parameter.register_hook(use)
    planner.within(model, "95%")
    measured = peak(model, use)
    plan = planner.plan_of(model)
    assert plan is not None and measured <= plan.peak_bytes - plan.resident_bytes
    assert plan.memory["gradients"] < sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(("arguments", "text"), [
    ({"backend": "inductor"}, "backend='inductor'"), ({"accumulation": 2}, "accumulation=2"),
    ({"parallel": planner.DataParallel("ddp", 2)}, "parallel")])
def test_plan_says_what_cannot_be(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"optimizer_in_backward=True: .*{text}"):
        planner.plan(made(), batch(), optimizer_in_backward=True, **arguments)


@pytest.mark.parametrize("arguments", [{"optimizer": None}, {"grad_clip": 1.0}])
def test_memory_says_what_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="optimizer_in_backward=True"):
        planner.memory(made(), batch(), **{"optimizer": "sgd", **arguments},
                       optimizer_in_backward=True)
