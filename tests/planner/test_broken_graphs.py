"""`planner.within` for a model that breaks into several graphs; the measured peak of the step and
the plain model are the oracles."""

import copy

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.memory.allocator import record_peak

pytestmark = pytest.mark.compat


class InTwo(nn.Module):
    """A model of two graphs, with dropout."""

    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Sequential(*(layer for _ in range(4) for layer in (
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1),
            nn.Linear(4 * width, width)))) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


BATCH = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))


def losses_and_peaks(model, steps=4):
    """By `model`, trained with SGD; peaks above the parameters and the batch."""
    optimizer, losses, peaks = torch.optim.SGD(model.parameters(), lr=0.05), [], []

    def step():
        loss = model(BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for number in range(steps):
        torch.manual_seed(number)
        peaks.append(record_peak(step, "cpu").peak_bytes)
    return losses, peaks


def test_one_budget_holds_for_all_graphs():
    plain = InTwo()
    expected, plain_peaks = losses_and_peaks(copy.deepcopy(plain))
    resident = sum(p.nbytes for p in plain.parameters()) + BATCH.nbytes
    budget = resident + int(0.6 * max(plain_peaks))
    losses, peaks = losses_and_peaks(planner.within(plain, budget, time_limit=1.5))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert max(peaks) + resident <= budget
    plan = planner.plan_of(plain)
    assert plan.peak_bytes <= budget and len(plan.spec.regions) == 2
    assert planner.steps_of(plain).unplanned == 0


def test_a_budget_that_cannot_be_met_is_refused_for_the_whole_step():
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        losses_and_peaks(planner.within(InTwo(), 900_000, time_limit=1.5), steps=2)
    assert refusal.value.minimum_bytes > 900_000
