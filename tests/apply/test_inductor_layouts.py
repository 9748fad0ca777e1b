"""Compiled steps with convolutions, whose layouts Inductor chooses; the measured peak is the
oracle."""

import pytest
import torch
from torch import nn

from planner._graph_capture.memory.allocator import record_peak
from planner.api import capture
from planner.plans.file import dumps, loads
from planner.search.planning import plan_within
from tests.support.compiler import needs_compiler
from tests.support.inductor import EFFORT, budget_at

pytestmark = [pytest.mark.compat, needs_compiler]

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def convolutions():
    torch.manual_seed(0)
    stack = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(4):
        stack += [nn.GELU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*stack)


def loss_of(output):
    return output.square().mean()


@pytest.fixture(scope="module")
def prepared():
    return capture(convolutions(), IMAGES, loss_fn=loss_of, backend="inductor")


@pytest.fixture(scope="module")
def tight(prepared):
    default = plan_within(prepared, None, EFFORT)
    assert not default.spec.low_memory_codegen  # it is what Inductor does by itself
    return plan_within(prepared, budget_at(prepared, default, 0.7), EFFORT)


def check_as_predicted(plan, make_model):
    """Peak and gradients of a step after the first."""
    model, plain = make_model(), make_model()
    applied = plan.apply(model)

    def step():
        output = applied(IMAGES)
        loss_of(output).backward()

    step()
    model.zero_grad(set_to_none=True)
    assert record_peak(step, "cpu").peak_bytes + plan.resident_bytes == plan.peak_bytes
    loss_of(plain(IMAGES)).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_plan_within_a_budget_is_as_predicted(prepared, tight):
    assert tight.spec.low_memory_codegen and tight.overhead > 0
    check_as_predicted(tight, convolutions)


@pytest.mark.slow
def test_a_file_says_so(tight):
    assert loads(dumps(tight)).spec == tight.spec
    assert '"low_memory_codegen": true' in dumps(tight)


class Block(nn.Module):
    """As of a ConvNeXt: all but the convolution has its channels in the last dimension."""

    def __init__(self, channels=16):
        super().__init__()
        self.spatial = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.inside = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, 4 * channels),
                                    nn.GELU(), nn.Linear(4 * channels, channels))
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        inside = self.scale * self.inside(self.spatial(x).permute(0, 2, 3, 1))
        return x + inside.permute(0, 3, 1, 2)


def channels_in_the_last_dimension():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 2, stride=2), *(Block() for _ in range(2)))


@pytest.fixture(scope="module")
def of_blocks():
    return capture(channels_in_the_last_dimension(), IMAGES, loss_fn=loss_of, backend="inductor")


@pytest.mark.slow
def test_a_plan_for_such_blocks_is_as_predicted(of_blocks):
    default = plan_within(of_blocks, None, EFFORT)
    plan = plan_within(of_blocks, budget_at(of_blocks, default, 0.75), EFFORT)
    check_as_predicted(plan, channels_in_the_last_dimension)
