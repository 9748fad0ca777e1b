"""Plans for Inductor whose code cannot be generated: for a GPU that is not here.

The oracle is the code that Inductor generates for a CPU: the bound must not be below its memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner._apply import host_store
from planner.api import capture
from planner.arguments import planning
from planner.plans.file import dumps, from_dict, loads
from planner.search.compiled_search import CompiledSearch
from planner.search.planning import plan_within
from planner.step.without_code import bound_without_code
from tests.support.altered_plans import signed
from tests.support.compiler import needs_compiler
from tests.support.inductor import (
    EFFORT,
    batch,
    budget_at,
    gradient,
    loss_of,
    make_model,
    measured_peak,
    step,
)
from tests.support.models import gpt2
from tests.support.offloading import with_link

RANKS = {
    "one": None,
    "ddp": planner.DataParallel("ddp", 2),
}


def without_code(prepared):
    """The step as if Inductor generated no code for it."""
    return replace(prepared, variants=tuple(
        replace(variant, compiled=replace(variant.compiled, tracer=None))
        for variant in prepared.variants))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return x.mean()


@pytest.mark.parametrize(("make", "inputs", "regions"), [
    (make_model, batch(), None),
    *(pytest.param(Convolutions, torch.zeros(4, 8, 16, 16), regions, marks=pytest.mark.slow)
      for regions in (None, ("blocks.*",))),
])
@needs_compiler
def test_the_code_of_a_cpu_takes_no_more_than_the_bound(make, inputs, regions):
    prepared = capture(make(), inputs, backend="inductor", regions=regions)
    search = CompiledSearch(prepared, prepared.base, EFFORT)
    least, schedule = search.least
    default = search.default()
    assert default.peak_bytes <= bound_without_code(
        prepared.base, default.schedule, is_ordered=False).peak_bytes
    half = search.schedule_within((least + default.peak_bytes) // 2)
    for each in {schedule or half, half}:
        bound = bound_without_code(prepared.base, each, is_ordered=True)
        assert search.evaluate(each, kernel_order=True).peak_bytes <= bound.peak_bytes
        assert sum(bound.by_category.values()) == bound.peak_bytes


@needs_compiler
def test_such_a_plan_stays_within_its_bound_where_it_runs():
    model = make_model(dropout=0.0)
    prepared = without_code(capture(model, batch(), loss_fn=loss_of, backend="inductor"))
    default = plan_within(prepared, None, EFFORT)
    plan = plan_within(prepared, budget_at(prepared, default, 0.8), EFFORT)
    assert plan.spec.kernel_order and plan.recompute_flops > 0
    step(model)
    expected = gradient(model)
    applied = plan.apply(model)
    step(applied)
    assert (gradient(applied) - expected).norm() <= 1e-5 * expected.norm()
    measured = measured_peak(applied)
    assert measured + plan.resident_bytes <= plan.peak_bytes <= plan.budget_bytes


@needs_compiler
def test_code_of_a_plan_that_lost_its_figures_stays_within_the_step_or_is_refused():
    model = make_model(dropout=0.0)
    prepared = capture(model, batch(), loss_fn=loss_of, backend="inductor")
    default = plan_within(prepared, None, EFFORT)
    small = plan_within(prepared, budget_at(prepared, default, 0.6), EFFORT).to_dict()
    document = default.to_dict()
    for name in ("forward_backward_peak_bytes", "peak_bytes", "memory"):
        document["predicted"][name] = small["predicted"][name]
    document |= {name: small[name] for name in ("memory_timeline", "budget_bytes")}
    for region in document["regions"]:
        region["code"] = []
    plan = from_dict(signed(document))
    applied = plan.apply(model)
    with pytest.raises(planner.PlanMismatch, match="code that Inductor generates"):
        step(applied)


def for_h100(ranks, budget):
    case = gpt2(layers=2, batch=4, seq=64, width=64, vocab=512)
    return planner.plan(
        case.model, case.inputs, budget=budget, backend="inductor", device="cuda", gpu="H100",
        time_limit=5, parallel=RANKS[ranks], hold_output=False)


@pytest.mark.slow
@needs_compiler
def test_compiled_steps_store_results_on_the_host():
    """A substitute is the host of this CPU (`apply.host_store`)."""
    model = make_model(dropout=0.0)
    prepared = with_link(without_code(
        capture(model, batch(), loss_fn=loss_of, backend="inductor")), 1e13)
    default = plan_within(prepared, None, EFFORT)
    plan = plan_within(prepared, budget_at(prepared, default, 0.7), EFFORT)
    assert plan.offloaded_bytes > 0 and loads(dumps(plan)) == plan
    assert any("experimental" in note for note in plan.notes)
    step(model)
    expected = gradient(model)
    applied = plan.apply(model)
    step(applied)
    assert (gradient(applied) - expected).norm() <= 1e-5 * expected.norm()
    stored = measured_peak(applied) + plan.resident_bytes
    assert stored <= plan.peak_bytes <= plan.budget_bytes
    kept = measured_peak(default.apply(model)) + plan.resident_bytes
    assert stored < kept
    assert not host_store._under_way


@pytest.mark.parametrize("ranks", ["one", pytest.param("ddp", marks=pytest.mark.slow)])
def test_planned_for_a_gpu_that_is_not_here(ranks):
    plan = for_h100(ranks, "90%")
    assert plan.backend == "inductor" and plan.peak_bytes <= plan.budget_bytes
    assert any("upper bound" in note for note in plan.notes) and "upper bound" in str(plan)
    assert loads(dumps(plan)) == plan


@pytest.mark.slow
def test_less_than_the_bound_needs_chunks(monkeypatch):
    monkeypatch.setattr(planning, "CHUNKS_OF", ((16, 4),))  # each is a whole graph
    case = gpt2(layers=1, batch=4, seq=64, width=64, vocab=512)

    def plan(budget, **arguments):
        return planner.plan(
            case.model, case.inputs, budget=budget, backend="inductor", device="cuda", gpu="H100",
            parallel=planner.DataParallel("fsdp2", 2, units=("transformer.h.*",)), time_limit=5,
            hold_output=False, **arguments)

    with pytest.raises(planner.InfeasibleBudget, match="upper bound") as refusal:
        plan("20%")
    chunked = plan(int(refusal.value.minimum_bytes * 0.9), allow="chunk")
    assert chunked.spec.chunks > 1 and chunked.peak_bytes <= chunked.budget_bytes
