"""Training in FP8: products of rounded operands, whose casts the plan may repeat."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.memory.allocator import record_peak

pytestmark = pytest.mark.filterwarnings(  # Dynamo's, which traces autograd functions
    "ignore:.*Function.* should not be instantiated:DeprecationWarning")


class RoundedProduct(torch.autograd.Function):
    """A product of FP8 operands, emulated; saves the rounded operands and their scales."""

    @staticmethod
    def forward(ctx, x, weight):
        saved = *rounded(x), *rounded(weight)
        ctx.save_for_backward(*saved)
        return unrounded(*saved[:2]) @ unrounded(*saved[2:]).T

    @staticmethod
    def backward(ctx, gradient):
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        gradient = unrounded(*rounded(gradient, torch.float8_e5m2))
        return (gradient @ unrounded(weight, weight_scale),
                gradient.T @ unrounded(x, x_scale))


def rounded(x, dtype=torch.float8_e4m3fn):
    scale = torch.finfo(dtype).max / x.detach().abs().amax().clamp(min=1e-12)
    return (x * scale).to(dtype), scale


def unrounded(x, scale):
    return x.to(torch.float32) / scale


class RoundedLinear(nn.Linear):
    def forward(self, x):
        return RoundedProduct.apply(x, self.weight) + self.bias


def emulated() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (RoundedLinear(64, 64), nn.GELU())))


def converted() -> nn.Module:
    float8 = pytest.importorskip("torchao.float8")
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())))
    return float8.convert_to_float8_training(
        model.to(torch.bfloat16), config=float8.Float8LinearConfig(emulate=True))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def batch(model: nn.Module, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed))
    return rows.to(next(model.parameters()).dtype)


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for seed in range(3):
        loss = loss_of(model(batch(model, seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        del loss
    return found


def peak(model: nn.Module) -> int:
    x = batch(model)

    def step() -> None:
        output = model(x)
        loss_of(output).backward()

    step()
    model.zero_grad()
    return record_peak(step, "cpu").peak_bytes


MODELS = [emulated, pytest.param(converted, marks=[
    pytest.mark.slow, pytest.mark.filterwarnings("default")])]  # which torchao raises


@pytest.mark.parametrize("make", MODELS)
def test_losses_under_a_plan_and_within_a_budget_are_those_of_plain(
        make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make()
    applied, held = make(), make()
    for each in (applied, held):
        each.load_state_dict(plain.state_dict())
    plan = planner.plan(applied, batch(applied), budget="85%", loss_fn=loss_of, optimizer="adamw")
    planned = plan.apply(applied)
    planner.within(held, "85%", loss_fn=loss_of)
    expected = losses(plain)
    assert losses(planned) == expected
    assert losses(held) == expected
    status = planner.status(held)
    assert status is not None
    assert status.planned_steps == 3
    assert status.worst_peak_bytes <= status.budget_bytes


@pytest.mark.parametrize("make", MODELS)
def test_casts_are_made_again_and_the_peak_is_the_predicted_one(
        make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    plan = planner.plan(model, batch(model), budget="75%", loss_fn=loss_of)
    assert peak(model) == plan.baseline_peak_bytes - plan.resident_bytes
    assert peak(plan.apply(model)) == plan.peak_bytes - plan.resident_bytes
    assert any(each.action == "recompute" and "_to_copy" in each.op for each in plan.decisions)
