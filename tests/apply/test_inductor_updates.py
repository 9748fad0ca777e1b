"""Buffers that a model updates, under Inductor: in the forward, as plain PyTorch does."""

import pytest
import torch
from torch import nn

from planner._graph_capture.training_graph import Phase
from planner.api import capture
from planner.search.compiled_search import schedule_saving
from tests.support.compiler import needs_compiler
from tests.support.training import plan_or_smallest

pytestmark = needs_compiler


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


def batch():
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def loss_of(output):
    return output.square().mean()


def test_running_statistics_belong_to_the_forward_and_are_computed_once():
    prepared = capture(make_model(), batch(), loss_fn=loss_of, backend="inductor")
    graph = prepared.base.graph
    updates = [op for op in graph.ops if op.target.startswith("aten.copy_")]
    assert len(updates) == 6  # mean, variance and count of two layers
    assert all(op.phase is Phase.FORWARD for op in updates)
    schedule = schedule_saving(prepared.base, prepared.base.compiled.saved_by_default)
    again = [graph.ops[i].target for i in set(schedule) if schedule.count(i) > 1]
    assert not any("var_mean" in target for target in again)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, "80%"])
def test_buffers_are_those_of_the_plain_model_after_each_forward(budget):
    plain, model, x = make_model(), make_model(), batch()
    plan = plan_or_smallest(model, x, loss_fn=loss_of, backend="inductor", budget=budget,
                            time_limit=4.0)
    applied = plan.apply(model)
    for with_backward in (False, True, False):
        outputs = [each(x) for each in (plain, applied)]
        for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)
        if with_backward:
            for output in outputs:
                loss_of(output).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
