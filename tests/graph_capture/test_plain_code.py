"""Captured steps follow the branches of plain eager code."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import planner
from planner.errors import PlanMismatch
from tests.support.models import BUILDERS


class Asking(nn.Module):
    """Goes other ways when it is compiled, when a mask is full, and where the tracer would stop."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            x = x.sin()
        if not mask.all():
            x = x * mask[:, None].to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Printing(Asking):
    """Where it is not compiled, it does what cannot be traced."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.note(x)
        return super().forward(x, mask)

    def note(self, x: torch.Tensor) -> None:
        if not torch.compiler.is_compiling():
            self.noted = open("/dev/null").close()


def batch(*padded: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(8, dtype=torch.long)
    mask[list(padded)] = 0
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), "mask": mask}


def gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    model(**inputs).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def ops(plan: planner.Plan) -> str:
    return " ".join(op.name for op in plan.spec.ops)


@pytest.mark.parametrize("regions", ["auto", "blocks"])
@pytest.mark.parametrize("kind", [Asking, Printing])
def test_code_that_asks_is_told_that_it_is_not_compiled(kind, regions):
    model, full = kind(), batch()
    plan = planner.plan(model, full, regions=regions)
    assert "aten.sin" in ops(plan) or regions == "blocks"
    for mine, plain in zip(gradients(plan.apply(model), full), gradients(kind(), full),
                           strict=True):
        assert torch.equal(mine, plain)


def test_a_step_that_takes_another_branch_is_refused_and_within_plans_it():
    model, full, padded = Asking(), batch(), batch(3)
    applied = planner.plan(model, full).apply(model)
    gradients(applied, full)
    with pytest.raises(PlanMismatch, match=r"decides by the values .*answer was True"):
        gradients(applied, padded)
    within = planner.within(Asking())
    for inputs in (full, padded, full, padded):
        for mine, plain in zip(gradients(within, inputs), gradients(Asking(), inputs),
                               strict=True):
            assert torch.equal(mine, plain)
    assert planner.steps_of(within).unplanned == 0


def test_a_plan_for_many_sizes_refuses_another_branch():
    model, full = Asking(), batch()
    plan = planner.plan(model, full, dynamic={"x": {0: "rows"}, "mask": {0: "rows"}})
    applied = plan.apply(model)
    half = {name: value[:4] for name, value in full.items()}
    for inputs in (full, half):
        with pytest.raises(PlanMismatch, match="first difference"):
            gradients(applied, batch(3))
        for mine, plain in zip(gradients(applied, inputs), gradients(Asking(), inputs),
                               strict=True):
            assert torch.equal(mine, plain)


@pytest.mark.parametrize("regions", ["model", "blocks"])
def test_inputs_without_values_are_taken_for_ones(regions):
    meta = {name: value.to("meta") for name, value in batch().items()}
    plan = planner.plan(Asking().to("meta"), meta, regions=regions)
    assert ["mask has no values" in text for text in plan.assumptions] == [True]
    assert "mask has no values" in str(plan)
    model = Asking()
    gradients(plan.apply(model), batch())
    assert planner.plan(Asking(), batch()).assumptions == ()
    if regions == "model":  # Around blocks, code that needs no gradient runs as it is written.
        with pytest.raises(PlanMismatch):
            gradients(plan.apply(Asking()), batch(3))


@pytest.mark.parametrize(("name", "masked"), [
    ("gpt2", ()), *(pytest.param("llama", masked, marks=pytest.mark.slow)
                    for masked in (None, (3, 5)))])
def test_losses_and_gradients_are_those_of_the_plain_step(name, masked):
    case = BUILDERS[name](layers=2)
    inputs = dict(case.inputs)
    inputs.pop("attention_mask", None)
    if masked is not None:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, list(masked)] = 0

    def step(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        loss = model(**inputs).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in case.model.parameters())]

    plan = planner.plan(case.model, inputs, budget="80%")
    plain, mine = step(case.model), step(plan.apply(case.model))
    assert all(map(torch.equal, plain, mine))


class Layout:
    def __init__(self, pattern: str) -> None:
        self.order, self.scale = [len(pattern) % 2, 0], {"by": 1 / len(pattern)}


class Cached(nn.Module):
    """Reads a pattern by functions that keep their results, as `einops` does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.read: list[str] = []

        @functools.lru_cache
        def layout(pattern: str, *, rank: int) -> Layout:
            self.read.append(pattern)
            return Layout(pattern)

        @functools.lru_cache
        def sizes(found: Layout, *shape: int) -> tuple[list[int], dict[str, float]]:
            self.read.append(str(shape))
            return [shape[place] for place in found.order], found.scale

        self.functions = layout, sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layout, sizes = self.functions
        for layer in self.layers:
            order, scale = sizes(layout("a b c", rank=2), *x.shape)
            x = layer(x).tanh() * scale["by"] + order[0] / order[1]
        return x.square().mean()


def test_functions_that_keep_their_results_are_called_as_often_as_in_the_plain_step():
    plain, model = Cached(), Cached()
    planner.within(model, "95%", time_limit=1)
    for _ in range(3):
        x = torch.randn(32, 16)
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
    assert plain.read == model.read == ["a b c", "(32, 16)"]
    assert planner.status(model).planned_steps == 3
