"""Without a budget a plan uses no more memory than the plain step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import planner
from tests.support.models import Case
from tests.support.training import measured_peak, reference, train

pytestmark = pytest.mark.filterwarnings(  # Dynamo does so where it traces one
    "ignore:.*Function.* should not be instantiated:DeprecationWarning")


class Again(torch.autograd.Function):
    """Rounds its weight in the forward, and again in the backward."""

    @staticmethod
    def rounded(weight: Tensor) -> Tensor:
        scale = weight.abs().amax() / 127
        return (weight / scale).round() * scale

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ Again.rounded(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ Again.rounded(weight).t(), x.t() @ gradient


class Rounded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return Again.apply(x, self.weight)


class Waves(nn.Module):
    """The derivative of each function is the other one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + x.cos()


LAYERS = {
    "rounded weights": lambda: (Rounded(128), nn.GELU()),
    "weight_norm": lambda: (weight_norm(nn.Linear(128, 128)),),
    "spectral_norm": lambda: (spectral_norm(nn.Linear(128, 128)), nn.ReLU()),
    "waves": lambda: (nn.Linear(128, 128), Waves()),
    "RMSNorm": lambda: (nn.Linear(128, 128), nn.RMSNorm(128)),
    "GroupNorm": lambda: (nn.Linear(128, 128), nn.GroupNorm(4, 128), nn.SiLU()),
}


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in LAYERS[name]()]
    return Case(nn.Sequential(*layers), (torch.randn(32, 128),), lambda out: out.square().mean())


def plan_of(case: Case) -> planner.Plan:
    return planner.plan(case.model, case.inputs, loss_fn=case.loss_fn)


@pytest.mark.parametrize("name", LAYERS)
def test_no_layer_takes_more_than_in_the_plain_step(name):
    case = case_of(name)
    plan = plan_of(case)
    assert plan.budget_bytes is None
    assert plan.peak_bytes <= 1.001 * plan.baseline_peak_bytes
    expected, applied = reference(case), plan.apply(case.model)
    assert train(applied, case).differences(expected) == []
    assert measured_peak(applied, case) == plan.peak_bytes - plan.resident_bytes


def test_what_both_directions_compute_is_kept_where_there_is_memory():
    """Sharing it saves time, and is chosen as far as the plain step's memory allows."""
    case = case_of("rounded weights")
    kept = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, solver="none")
    plan = plan_of(case)
    assert kept.overhead == 0.0 and kept.peak_bytes > kept.baseline_peak_bytes
    assert plan.overhead > 0
    assert any("more than the" in note for note in kept.notes)
    assert not any("more than the" in note for note in plan.notes)
    roomy = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, budget=kept.peak_bytes)
    assert roomy.overhead == 0.0


def test_a_plain_step_that_keeps_less_is_matched():
    case = case_of("weight_norm")
    assert plan_of(case).overhead == 0.0  # by the order of the backward


def test_nothing_is_recomputed_where_the_plain_step_keeps_as_much():

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    plan = planner.plan(model, torch.randn(16, 64), loss_fn=lambda out: F.mse_loss(
        out, torch.zeros_like(out)))
    assert (plan.recompute_flops, plan.overhead, plan.status) == (0, 0.0, "optimal")
