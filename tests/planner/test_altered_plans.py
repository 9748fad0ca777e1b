"""A plan file is data from outside: whatever is changed in one, it is refused or harmless.

The step that a changed plan is for is simulated on the graph that the model really has: within the
budget that the file states, and legal.  Some are applied and trained: equal gradients, and a
measured peak within that budget.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import nn

import planner
from planner._apply.plan_backend import different_op
from planner._apply.rewrite_spec import InplaceReuse
from planner._apply.same_step import difference_from_step, outputs_let_go
from planner._graph_capture.joint_graph.lower import LoweredRegion
from planner.errors import InfeasibleBudget
from planner.plans.checking import stated_variant
from planner.plans.decisions import schedule_of
from planner.plans.file import from_dict
from planner.plans.plan import Plan
from planner.search.planning import plan_within
from planner.solvers.simulator import Timeline, unroll
from planner.step.variant import Variant
from tests.support.altered_plans import Altering, forged, signed
from tests.support.compiler import needs_compiler
from tests.support.loss_head import Head, batch
from tests.support.models import Case, causal_model
from tests.support.offloading import with_link
from tests.support.training import (
    EFFORT,
    Trace,
    captured,
    measured_peak,
    reference,
    train,
)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1),
                                         nn.Linear(64, 16)) for _ in range(count)))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(1), layers(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def case_of(kind: str) -> Case:
    torch.manual_seed(0)
    if kind == "chunks":
        return Case(Head("mean"), batch(), None)
    if kind in ("blocks", "ranks"):
        return causal_model(seq=16, width=32, dropout=0.1)
    model = Broken() if kind == "regions" else layers(3)
    return Case(model, (torch.randn(128, 16),), square)


ARGUMENTS = {
    "chunks": {"allow": ("recompute", "chunk")},
    "blocks": {"regions": "blocks", "optimizer": "adamw"},
    "ranks": {"parallel": planner.DataParallel("ddp", 2), "optimizer": "adamw"},
    "inductor": {"backend": "inductor"},
    "sizes": {"dynamic": {"input": {0: "batch"}}},
}
"""What is planned, by kind; the others are of a plain step."""


@dataclass(frozen=True, eq=False)
class Original:
    """A plan as it was made, and the graph that the model has."""

    case: Case
    plan: Plan
    variant: Variant
    met: dict[int, LoweredRegion]
    """The regions that a step met when the plan was applied; none where it cannot be applied."""
    reference: Trace | None

    def refuses(self, plan: Plan) -> bool:
        """Whether the model's own graph tells that a plan is not for it."""
        mine, theirs = ([(region.block, region.cotangents, region.hoisted)
                         for region in spec.regions]
                        for spec in (self.plan.spec, plan.spec))
        return mine != theirs or any(
            different_op(plan.spec.regions[index], lowered)
            or difference_from_step(plan.spec, index, lowered)
            for index, lowered in self.met.items()
            if index < len(plan.spec.regions)
        )

    def is_said(self, plan: Plan) -> bool:
        """Whether a plan counts on outputs being let go that the plan as it was made holds, which
        is said in a warning where the caller holds them."""
        return any(outputs_let_go(plan.spec, index, lowered)
                   != outputs_let_go(self.plan.spec, index, lowered)
                   for index, lowered in self.met.items())

    def evaluate(self, plan: Plan) -> str:
        """What the schedule of a plan that was not refused does to the graph that the model has."""
        timeline = unroll(self.variant.problem, schedule_of(self.variant, plan.spec))
        if plan.backend == "eager":
            if not all(_is_legal(self.variant, timeline, reuse) for region in plan.spec.regions
                       for reuse in region.inplace_reuses):
                return "WRONG REUSES"
            net_bytes = plan.peak_bytes - plan.resident_bytes
            if plan.optimizer is None and timeline.peak_bytes > net_bytes:
                return "OVER THE BUDGET"
        return "harmless"


def _is_legal(variant: Variant, timeline: Timeline, reuse: InplaceReuse) -> bool:
    """Whether the operand that is written over dies there, and was made in the same segment."""
    index = variant.graph.index_of[reuse.op]
    position = [at for at, op in timeline.runs if op == index][reuse.run]
    storage = variant.graph.ops[index].inplace[reuse.candidate]
    return not variant.problem.storages[storage].kept_to_end and any(
        each.storage == storage and each.death == position
        and timeline.segments[each.birth] == timeline.segments[position]
        for each in timeline.instances)


@functools.cache
def original(kind: str) -> Original:
    case = case_of(kind)
    step = captured(case, **ARGUMENTS.get(kind, {}))
    if kind == "offload":
        step = with_link(step, 1e9)
    peak = step.keep_all_peak_bytes
    try:
        plan = plan_within(step, int(0.75 * peak), EFFORT)
    except InfeasibleBudget as refusal:
        plan = plan_within(step, refusal.minimum_bytes, EFFORT)
    met: dict[int, LoweredRegion] = {}
    if kind == "ranks":
        return Original(case, plan, stated_variant(plan), met, None)

    def meet(spec: object, index: int, lowered: LoweredRegion, **_: bool) -> None:
        met[index] = lowered

    with mock.patch("planner._apply.plan_backend.difference_from_step", side_effect=meet):
        train(plan.apply(case.model), case, steps=1)
    return Original(case, plan, stated_variant(plan), met, reference(case))


def load_and_simulate(kind: str, count: int, seed: int) -> Counter[str]:
    """What becomes of so many changed files."""
    owner, dice = original(kind), random.Random(seed)
    document = owner.plan.to_dict()
    altering = Altering(document)
    found: Counter[str] = Counter()
    for number in range(count):
        way = ("plain", "signed", "signed", "forged")[number % 4]
        if way == "forged" and not owner.met:
            way = "signed"
        steers = ("regions", "ops", "buffers") if number % 3 else ()
        changed = altering.altered(dice, steers)
        if way == "forged":
            made = forged(document, changed)
            changed = signed(changed) if made is None else made.to_dict()
        elif way == "signed":
            changed = signed(changed)
        try:
            plan = from_dict(changed)
        except planner.PlanFileError:
            found["refused"] += 1
            continue
        found["not for this graph" if owner.refuses(plan) else
              "said in a warning" if owner.is_said(plan) else owner.evaluate(plan)] += 1
    return found


QUICK, ALL = 150, 300


def test_changed_files_are_refused_or_harmless():
    found = load_and_simulate("plain", QUICK, 1)
    assert not any(name.isupper() for name in found), found
    assert found["refused"] > QUICK / 2 and found["not for this graph"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "regions", "blocks", "chunks", "offload", "ranks",
                                  "sizes", pytest.param("inductor", marks=needs_compiler)])
def test_many_changed_files_are_refused_or_harmless(kind):
    found = load_and_simulate(kind, ALL, 2)
    assert not any(name.isupper() for name in found), found
    assert found["refused"] > ALL / 3


def apply_and_train(kind: str, count: int, seed: int) -> Counter[str]:
    """What becomes of so many changed files that are read without complaint."""
    owner, dice = original(kind), random.Random(seed)
    document = owner.plan.to_dict()
    altering = Altering(document)
    found: Counter[str] = Counter()
    while found.total() < count:
        changed = altering.altered(dice, ("regions", "ops", "buffers") if dice.random() < 0.8
                                   else ())
        made = forged(document, changed)
        try:
            plan = from_dict(signed(changed) if made is None else made.to_dict())
        except planner.PlanFileError:
            continue
        torch._dynamo.reset()
        try:
            planned = plan.apply(owner.case.model)
            trained = train(planned, owner.case)
            # Sums over chunks are rounded in another order than the plain model's.
            if (trained.distance(owner.reference) > 1e-5 if owner.plan.spec.is_variant
                    else trained.differences(owner.reference)):
                found["WRONG GRADIENTS"] += 1
                continue
        except planner.PlanMismatch:
            found["refused"] += 1
            continue
        except UserWarning as warning:
            assert "are still held" in str(warning) or "runs without it" in str(warning), warning
            found["said in a warning"] += 1
            continue
        net_bytes = plan.peak_bytes - plan.resident_bytes
        over = (plan.optimizer is None
                and measured_peak(planned, owner.case) > net_bytes)
        found["OVER THE BUDGET" if over else "harmless"] += 1
    return found


def test_changed_plans_that_are_read_train_as_the_model_or_are_refused():
    found = apply_and_train("plain", 8, 3)
    assert not any(name.isupper() for name in found), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "regions", "chunks", "offload", "sizes"])
def test_many_changed_plans_that_are_read_train_as_the_model_or_are_refused(kind):
    found = apply_and_train(kind, 12 if kind == "sizes" else 50, 4)
    assert not any(name.isupper() for name in found), found
    assert found["refused"] > 0 and found["harmless"] > 0
