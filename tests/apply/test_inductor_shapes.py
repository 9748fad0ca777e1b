"""A plan for Inductor and inputs of other sizes than it was made with.

Most tests generate code without compiling it and follow it on fake tensors.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.training_graph import CodeMemory
from planner.api import capture
from planner.plans.file import dumps, loads
from planner.search.planning import Effort, plan_within
from tests.support.compiler import needs_compiler
from tests.support.models import Case
from tests.support.training import measured_peak, reference, train

pytestmark = [needs_compiler, pytest.mark.slow]

PLANNED = 96
SMALLER = (64, 95, 7)


def build(batch=PLANNED):
    """A network whose code holds constants of the batch's size: means, corrections of variances."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 32),
              nn.LayerNorm(32)]
    model = nn.Sequential(*layers, *copy.deepcopy(layers))
    return Case(model, (torch.randn(batch, 32),), lambda output: output[:, 0].exp().mean())


def prepare(case):
    return capture(case.model, case.inputs, loss_fn=case.loss_fn, backend="inductor", probe=False)


@pytest.fixture(scope="module")
def plan():
    """Within 80% of what the compiled step takes, or the smallest."""
    prepared = prepare(build())
    default = plan_within(prepared, None)
    budget = prepared.resident_bytes + int(
        0.8 * (default.peak_bytes - prepared.resident_bytes))
    effort = Effort(time_limit=4.0)
    try:
        return plan_within(prepared, budget, effort)
    except planner.InfeasibleBudget as refusal:
        return plan_within(prepared, refusal.minimum_bytes, effort)


def test_the_budget_holds_for_every_smaller_size(plan):
    peaks = set()
    for batch in SMALLER:
        small = prepare(build(batch))
        step = small.base.compiled.trace(plan.spec)
        assert step.peak_bytes <= plan.forward_backward_peak_bytes - plan.resident_bytes
        peaks.add(step.peak_bytes)
    assert len(peaks) == len(SMALLER)


def test_a_smaller_batch_compiles_and_trains(plan):
    small = build(SMALLER[0])
    model = loads(dumps(plan)).apply(small.model)
    assert measured_peak(model, small) <= plan.budget_bytes - plan.resident_bytes
    assert float((gradient(train(model, small)) - gradient(reference(small))).norm()) <= 1e-5 * (
        float(gradient(reference(small)).norm()))


def gradient(trace):
    """All gradients as one vector: some are zero but for rounding (a bias before a BatchNorm)."""
    return torch.cat([tensor.double().flatten() for tensor in trace.gradients.values()])


def test_a_larger_batch_is_refused(plan):
    larger = build(PLANNED + 1)
    with pytest.raises(planner.PlanMismatch, match="serves inputs up to the size"):
        train(plan.apply(larger.model), larger)


def test_code_that_takes_more_than_planned_is_refused(plan):
    nothing = tuple(CodeMemory(0, 0) for _ in range(2))
    spec = replace(plan.spec, regions=tuple(
        replace(region, code=nothing) for region in plan.spec.regions))
    small = build(SMALLER[1])
    with pytest.raises(planner.PlanMismatch, match="these smaller inputs takes"):
        train(replace(plan, spec=spec).apply(small.model), small)
