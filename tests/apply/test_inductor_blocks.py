"""Plans for Inductor whose repeated blocks are compiled one by one.

The oracles: the allocator's events, and gradients of the plain model.
"""

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

import planner
from planner._apply.blocks import shared_code
from planner._apply.plan_backend import PlanBackend
from planner.api import capture
from planner.plans.file import dumps, loads
from planner.search.compiled import smallest_plan
from planner.search.planning import Effort, plan_within
from tests.support.compiler import needs_compiler
from tests.support.models import BUILDERS, Case, language_model
from tests.support.training import measured_peak, reference, train

pytestmark = [pytest.mark.compat, needs_compiler]

EFFORT = Effort(time_limit=2.0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


class Stack(nn.Module):
    """Blocks with code between them, some of which depends on values."""

    def __init__(self, layers, width=32):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x, mask):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).tanh()
            if not bool(mask.all()):
                x = x * mask
        return x


def stack(layers=4, batch=128):
    torch.manual_seed(0)
    return Case(Stack(layers), (torch.randn(batch, 32), torch.arange(32) > 3),
                lambda output: output.square().mean())


def prepare(case):
    return capture(case.model, case.inputs, loss_fn=case.loss_fn, backend="inductor",
                   regions="blocks")


def plan_at(step, share):
    """For a share of what the step takes without a budget, or for the smallest budget."""
    net = plan_within(step, None, EFFORT).peak_bytes - step.resident_bytes
    try:
        return plan_within(step, step.resident_bytes + int(share * net), EFFORT)
    except planner.InfeasibleBudget as refusal:
        return plan_within(step, refusal.minimum_bytes, EFFORT)


@pytest.fixture(scope="module")
def prepared():
    return prepare(stack())


@pytest.fixture(scope="module")
def tight(prepared):
    return plan_at(prepared, 0.8)


def check_step(plan, case):
    """The measured peak is the predicted one, and the gradients are those of the plain model."""
    model = plan.apply(case.model)
    # First: what Dynamo compiles with holds arguments that a block does not use, some bytes here.
    assert train(model, case).distance(reference(case)) <= 1e-5
    assert measured_peak(model, case) == plan.forward_backward_peak_bytes - plan.resident_bytes
    assert plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes


def test_equal_blocks_run_one_code_and_the_step_takes_what_was_predicted(prepared):
    default = plan_within(prepared, None, EFFORT)
    assert len(default.spec.regions) == 4
    assert [len(group.blocks) for group in shared_code(default.spec)] == [4]
    check_step(loads(dumps(default)), stack())


def test_code_is_generated_once_for_each_decision(prepared, tight, monkeypatch):
    def refuse(*args):
        raise AssertionError("its code was generated before")

    groups = shared_code(tight.spec)
    assert sorted(name for group in groups for name in group.blocks) == [
        f"blocks.{layer}" for layer in range(4)]
    for group in groups:
        codes = {tight.spec.regions[index].code for index in group.regions}
        assert len(codes) == 1
        assert all(codes)
    monkeypatch.setattr(PlanBackend, "_matching_region", refuse)
    prepared.base.compiled._known.clear()
    default = plan_within(prepared, None, EFFORT)
    assert default.peak_bytes > tight.peak_bytes
    assert default.overhead < tight.overhead


@pytest.mark.slow
def test_different_decisions_take_what_was_predicted(tight):
    check_step(tight, stack())


@pytest.mark.slow
def test_a_budget_that_is_too_small_names_one_that_works(prepared):
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        plan_within(prepared, prepared.resident_bytes, EFFORT)
    least = refusal.value.minimum_bytes
    assert plan_within(prepared, least, EFFORT).peak_bytes <= least


def test_tracing_blocks_leaves_the_users_model_alone():
    case = stack(layers=2)
    before = {name: set(vars(module)) for name, module in case.model.named_modules()}
    plan = plan_within(prepare(case), None, EFFORT)
    assert {name: set(vars(module)) for name, module in case.model.named_modules()} == before
    assert sum(plan.memory.values()) == plan.peak_bytes


@pytest.mark.slow
def test_a_block_that_is_called_twice():
    case = BUILDERS["block_twice"](layers=2)
    with inductor_config.patch(fallback_random=True):
        step = prepare(case)
        for plan in (plan_at(step, 0.8), smallest_plan(step, EFFORT)):
            check_step(plan, case)


@pytest.mark.slow
def test_smaller_batches_are_served_by_blocks_too():
    plan = plan_at(prepare(language_model(layers=2, batch=5)), 0.8)
    smaller = language_model(layers=2, batch=3)
    model = plan.apply(smaller.model)
    assert measured_peak(model, smaller) <= plan.budget_bytes - plan.resident_bytes
    assert train(model, smaller).distance(reference(smaller)) <= 1e-5


@pytest.mark.slow
def test_kernels_of_blocks_are_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    case = stack(layers=2)
    step = capture(case.model, case.inputs, loss_fn=case.loss_fn, backend="inductor",
                   regions="blocks", cost_model="measured")
    plan = plan_at(step, 0.8)
    planned, unplanned = step.base.compiled._seconds.values()
    assert min(planned, unplanned) > 0
    assert plan.overhead == planned / unplanned - 1
