"""A plan stays where its model goes: copies, files, wrappers, compiled surroundings.

The oracle is the allocator: a step that runs under the plan takes the plan's bytes, to the last.
"""

from __future__ import annotations

import copy
import inspect
import io
import types
import warnings
from collections.abc import Collection, Iterable

import pytest
import torch
from torch import nn

import planner
from planner._apply.planned_forward import apply_spec
from tests.support.models import Case, language_model
from tests.support.training import measured_peak, reference, train

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def case() -> Case:
    return language_model(layers=2)


def plan_of(case: Case, **options: object) -> planner.Plan:
    return planner.plan(case.model, case.inputs, **{
        "loss_fn": case.loss_fn, "time_limit": 2, "budget": "95%", **options})


@pytest.fixture(scope="module")
def plan(case) -> planner.Plan:
    return plan_of(case)


@pytest.fixture(scope="module")
def by_blocks(case) -> planner.Plan:
    return plan_of(case, regions="blocks")


def above_resident(plan: planner.Plan) -> int:
    return plan.peak_bytes - plan.resident_bytes


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


COPIES = {"deepcopy": copy.deepcopy, "averaged": averaged, "saved": saved_and_loaded,
          "copy of a wrapper": lambda model: copy.deepcopy(Outer(model))}


def both(kinds: Iterable[str], quick: Collection[str]) -> pytest.MarkDecorator:
    """Every kind, for the model as a whole and by blocks, where only some are quick."""
    return pytest.mark.parametrize(("kind", "regions"), [
        pytest.param(kind, regions, marks=() if regions == "model" or kind in quick else
                     pytest.mark.slow)
        for kind in kinds for regions in ("model", "blocks")])


@both(COPIES, quick=("saved",))
def test_copies_keep_the_plan(case, plan, by_blocks, kind, regions):
    used = plan if regions == "model" else by_blocks
    applied = used.apply(case.model)
    copied = COPIES[kind](applied)
    assert {id(p) for p in copied.parameters()}.isdisjoint(map(id, applied.parameters()))
    mine = case._replace(model=copied)
    assert measured_peak(copied, mine) == above_resident(used)
    assert planner.steps_of(copied).planned == 1
    assert planner.steps_of(applied).planned == 0
    assert measured_peak(applied, case) == above_resident(used)
    assert all(p.grad is None for p in copied.parameters())


def wrapped_by_compile(model: nn.Module) -> nn.Module:
    return torch.compile(Outer(model), backend="eager")


CALLS = {"forward": lambda model: model.forward, "compiled around": wrapped_by_compile,
         "compiled": lambda model: torch.compile(model, backend="eager"), "held": Outer}


@both(CALLS, quick=())
def test_every_way_to_call_runs_the_plan(case, plan, by_blocks, kind, regions):
    used = plan if regions == "model" else by_blocks
    applied = used.apply(case.model)
    assert measured_peak(CALLS[kind](applied), case) == above_resident(used)
    assert planner.steps_of(applied).planned == 1


def test_a_plan_runs_though_another_was_made_by_blocks(case):
    plan = plan_of(case)
    plan_of(case, regions="blocks")
    assert measured_peak(plan.apply(case.model), case) == above_resident(plan)


def test_what_may_not_break_says_so(case, plan):
    class Whole(Outer):  # with code of its own, which was not compiled before
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids)

    whole = torch.compile(Whole(plan.apply(case.model)), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(*case.args)


def test_hooks_run_around_the_plan(case, plan):
    applied = plan.apply(case.model)
    seen = []
    applied.register_forward_pre_hook(lambda module, args: seen.append("before"))
    applied.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    try:
        assert measured_peak(applied, case) == above_resident(plan)
    finally:  # The hooks' dictionaries are shared with the user's model.
        applied._forward_pre_hooks.clear()
        applied._forward_hooks.clear()
    assert seen == ["before", True]


def test_a_block_alone_is_an_ordinary_module(case, by_blocks):
    block = copy.deepcopy(by_blocks.apply(case.model).blocks[0])
    width = block.down.weight.shape[0]
    block(torch.randn(2, 4, width)).sum().backward()
    assert block.down.weight.grad is not None


# --- Others wrap the forward ----------------------------------------------------------------------


def rebind(model: nn.Module) -> nn.Module:
    """As accelerate does for mixed precision, but for the precision."""
    inner = model.forward.__func__

    def forward(*args: object, **kwargs: object) -> object:
        return inner(*args, **kwargs)

    forward.__wrapped__ = inner
    model._original_forward = model.forward
    model.forward = types.MethodType(forward, model)
    return model


@pytest.mark.parametrize("regions", ["model", "blocks"])
@pytest.mark.parametrize("order", [
    *(pytest.param(order, marks=pytest.mark.slow) for order in ("wrapped first", "applied first")),
    "planned wrapped"])
def test_a_rebound_forward_keeps_the_plan(regions, order):
    mine = language_model(layers=2)
    if order == "planned wrapped":
        rebind(mine.model)
    used = plan_of(mine, regions=regions)
    if order == "applied first":
        applied = rebind(used.apply(mine.model))
    else:
        applied = used.apply(mine.model if order == "planned wrapped" else rebind(mine.model))
    assert measured_peak(applied, mine) == above_resident(used)
    copied = copy.deepcopy(applied)
    assert measured_peak(copied, mine._replace(model=copied)) == above_resident(used)
    assert planner.steps_of(applied).planned == planner.steps_of(copied).planned == 1
    applied.forward = types.MethodType(applied.forward.__func__, applied)  # as it is unwrapped
    assert measured_peak(applied, mine) == above_resident(used)


def test_names_are_those_of_the_model_whatever_wraps_its_forward(plan):
    mine = language_model(layers=2)
    rebind(rebind(mine.model))
    again = plan_of(mine)
    assert [key.name for key in again.spec.regions[0].forward] == [
        key.name for key in plan.spec.regions[0].forward]


def test_the_signature_is_that_of_the_model(case, plan):
    assert inspect.signature(plan.apply(case.model).forward) == inspect.signature(
        case.model.forward)


# --- Counting -------------------------------------------------------------------------------------


def test_steps_are_counted_and_each_reason_is_said_once(case, plan):
    applied = plan.apply(case.model)
    steps = planner.steps_of(applied)
    with torch.no_grad():
        applied(*case.args)
    applied(*case.args)
    assert (steps.planned, steps.unplanned, steps.last_reason) == (1, 0, None)
    applied.eval()
    try:
        with pytest.warns(UserWarning, match="made in train mode"):
            applied(*case.args)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            applied(*case.args)
    finally:
        applied.train()
    assert (steps.planned, steps.unplanned) == (1, 2) and "eval mode" in steps.last_reason


def test_blocks_that_are_not_called_are_missed(case, by_blocks):
    applied = by_blocks.apply(case.model)
    # Of a model without the plan; captured, it would be refused.
    applied.forward.inner = torch.compiler.disable(copy.deepcopy(case.model).forward)
    with pytest.warns(UserWarning, match="no block of the plan ran"):
        applied(*case.args)
    assert planner.steps_of(applied).unplanned == 1


# --- Several rewrite specs
# ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_recipe_that_serves_is_taken_and_others_are_asked_for_once():
    mine = language_model(layers=1, batch=3)
    asked: list[int] = []

    def replan(model: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]):
        asked.append(len(args[0]))
        return planner.plan(model, args, time_limit=1).spec

    first = planner.plan(mine.model, mine.args, time_limit=1).spec
    applied = apply_spec(mine.model, first, replan=replan)
    for batch in (3, 2, 5, 4, 3, 5, 2):
        step = language_model(layers=1, batch=batch)._replace(model=mine.model)
        assert train(applied, step, steps=1).differences(train(
            torch.compile(mine.model, backend="eager"), step, steps=1)) == []
    assert asked == [5]
    assert planner.steps_of(applied).planned == 7


def test_a_function_that_cannot_be_pickled_is_left_behind_with_a_word(case, plan):
    applied = plan.apply(case.model, replan=lambda model, inputs: plan)
    with pytest.warns(UserWarning, match="cannot be pickled"):
        loaded = saved_and_loaded(applied)
    assert measured_peak(loaded, case._replace(model=loaded)) == above_resident(plan)
    larger = language_model(layers=2, batch=case.args[0].shape[0] + 1)
    with pytest.raises(planner.PlanMismatch):
        loaded(*larger.args)


def test_numbers_are_those_of_the_plain_model(case, plan):
    copied = copy.deepcopy(plan.apply(case.model))
    mine = case._replace(model=copy.deepcopy(case.model))
    assert train(copied, case._replace(model=copied)).differences(reference(mine)) == []
