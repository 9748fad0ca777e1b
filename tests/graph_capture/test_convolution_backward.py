"""The backward of a convolution in two halves: the same gradients, in less memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.models import Case
from tests.support.regions import joint_graph
from tests.support.training import apply_schedule, captured, measured_peak, reference, train

BATCH, CHANNELS, IMAGE = 2, 16, 32
MAP_BYTES = 4 * BATCH * CHANNELS * IMAGE ** 2


def backwards(model: nn.Module, x: torch.Tensor) -> list[list[bool]]:
    """Which gradients each backward of a convolution makes: of input, weight, bias."""
    graph = joint_graph(model, x, loss_fn=torch.sum).graph
    return [list(node.args[10]) for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution_backward.default)]


@pytest.mark.parametrize(("layer", "bias", "dtype"), [
    (lambda bias: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=bias), True, torch.float32),
    (lambda bias: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=bias), False, torch.float64),
    (lambda bias: nn.Conv2d(CHANNELS, CHANNELS, 3, 2, groups=CHANNELS, bias=bias), False,
     torch.float32),
    (lambda bias: nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2, bias=bias), True, torch.float32)])
def test_the_halves_give_the_gradients_of_the_whole(layer, bias, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(layer(bias), nn.Tanh(), layer(bias)).to(dtype)
    x = torch.randn(2, CHANNELS, 12, 12, dtype=dtype)
    assert backwards(model, x) == [[False, True, bias], [True, False, False], [False, True, bias]]
    case = Case(model, (x,), torch.sum)
    step = captured(case)
    planned, _ = apply_schedule(case, step, step.base.problem.keep_all_schedule)
    assert train(planned, case).differences(reference(case)) == []


def test_a_frozen_weight_leaves_one_half():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1, bias=False))
    model[1].requires_grad_(False)
    assert backwards(model, torch.randn(1, 3, 4, 4)) == [[True, False, False], [False, True, True]]


def test_the_buffers_of_one_gradient_are_gone_when_the_next_is_made():
    """As where a U-Net merges: more channels come in than go out."""
    layers = [nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1, bias=False),
              nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1, bias=False)]
    x = torch.randn(BATCH, CHANNELS, IMAGE, IMAGE)
    weights = torch.randn_like(x)
    case = Case(nn.Sequential(*layers), (x,), lambda y: (y * weights).sum())
    step = captured(case)
    planned, timeline = apply_schedule(case, step, step.base.problem.keep_all_schedule)
    peak = measured_peak(planned, case)
    assert peak == pytest.approx(timeline.peak_bytes, rel=0.001)
    assert measured_peak(case.model, case) - peak > 0.9 * MAP_BYTES
