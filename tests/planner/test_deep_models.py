"""Deep models are planned by their blocks, of which equal ones are traced once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import planner
from planner._apply.blocks import PlannedBlocks
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.module_forward import forward_override
from planner.attached import known
from planner.attached.symbolic_graph import SymbolicGraph
from tests.support.models import LanguageModel, tokens
from tests.support.training import assert_same_gradients


@pytest.fixture(autouse=True)
def _three_blocks_are_deep(monkeypatch):
    monkeypatch.setattr(known, "_DEEP", 3)


class Classifier(LanguageModel):
    """Returns the loss and the logits."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()),
                "logits": logits}


def model_of(layers: int, **options: float) -> Classifier:
    torch.manual_seed(0)
    return Classifier(layers, 32, 64, **options)


def train(model: nn.Module, lengths: list[int]) -> list[int]:
    """Train in steps of these lengths; the numbers of graphs that were traced in them."""
    traced = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for index, length in enumerate(lengths):
        before = counters["stats"]["unique_graphs"]
        torch.manual_seed(index)
        optimizer.zero_grad()
        model(tokens(4, length, 64))["loss"].backward()
        optimizer.step()
        traced.append(counters["stats"]["unique_graphs"] - before)
    return traced


def assert_trains_alike(model: nn.Module, plain: nn.Module, lengths: list[int]) -> list[int]:
    """The numbers of graphs that were traced in steps of these lengths."""
    train(plain, lengths)
    traced = train(model, lengths)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    return traced


@pytest.mark.parametrize("layers", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_equal_blocks_are_traced_once_for_all_steps(layers):
    plain = model_of(layers)
    model = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    traced = assert_trains_alike(model, plain, [16] * 4)
    assert 0 < traced[0] <= 4  # a block, and what stands around the blocks; not each block
    assert not any(traced[1:])
    graph, = forward_override(model).graphs
    assert isinstance(graph.code, PlannedBlocks)
    assert graph.plans_made > 1
    assert graph.code.compilations == 0
    assert planner.status(model).planned_steps == 4


@pytest.mark.slow
def test_layers_that_drop_are_the_same():
    plain = model_of(3, dropout=0.2)
    model = planner.within(copy.deepcopy(plain), "70%", time_limit=1)
    assert_trains_alike(model, plain, [16] * 3)
    assert planner.status(model).planned_steps == 3


@pytest.mark.slow
def test_a_frozen_block_has_code_of_its_own():
    plain = model_of(3)
    plain.blocks[0].requires_grad_(False)
    plain.embedding.requires_grad_(False)
    model = planner.within(copy.deepcopy(plain), "95%", time_limit=1)
    assert_trains_alike(model, plain, [16] * 3)
    assert planner.status(model).planned_steps == 3


def test_the_predicted_peak_is_the_measured_one():
    model = planner.within(model_of(4), "80%", time_limit=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batch = tokens(4, 16, 64)

    def step() -> None:
        model(batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    resident = batch.nbytes + sum(each.nbytes for each in model.parameters()) + sum(
        each.nbytes for state in optimizer.state.values() for each in state.values())
    graph, = forward_override(model).graphs
    assert isinstance(graph.code, PlannedBlocks)
    plan = planner.plan_of(model)
    assert record_peak(step, "cpu").peak_bytes + resident == plan.peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_fewer_blocks_and_the_named_whole_are_one_region():
    for model in (planner.within(model_of(2), "95%", time_limit=1),
                  planner.within(model_of(3), "95%", time_limit=1, regions="model")):
        model(tokens(4, 16, 64))["loss"].backward()
        assert not planner.plan_of(model).spec.blocks


@pytest.mark.slow
def test_another_length_takes_the_graph_of_the_whole_model_with_symbolic_sizes():
    plain = model_of(3)
    model = planner.within(copy.deepcopy(plain), "90%", time_limit=1)
    traced = assert_trains_alike(model, plain, [16, 16, 12, 14, 10, 16])
    assert traced[1:] == [0, 1, 0, 0, 0]
    symbolic, by_blocks = forward_override(model).graphs
    assert isinstance(symbolic, SymbolicGraph)
    assert isinstance(by_blocks.code, PlannedBlocks)
    assert planner.status(model).planned_steps == 6


class OtherOrder(Classifier):
    """The graph returns the logits once."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(ids)
        return {"logits": found["logits"], "again": found["logits"], "loss": found["loss"]}


@pytest.mark.slow
def test_a_graph_of_other_outputs_is_not_taken():
    torch.manual_seed(0)
    plain = OtherOrder(3, 32, 64, dropout=0.2)
    model = planner.within(copy.deepcopy(plain), "95%", time_limit=1)
    assert_trains_alike(model, plain, [16, 16, 12, 12, 10])
    assert not any(isinstance(graph, SymbolicGraph) for graph in forward_override(model).graphs)
    assert planner.status(model).planned_steps == 5


@pytest.mark.slow
def test_where_no_plan_by_blocks_fits_the_model_is_one_region():
    model, inputs = model_of(3), (tokens(4, 16, 64),)
    least = []
    for regions in ("model", "blocks"):
        with pytest.raises(planner.InfeasibleBudget) as refusal:
            planner.plan(model, inputs, budget=1000, regions=regions, optimizer="sgd",
                         hold_output=True, time_limit=1)
        least.append(refusal.value.minimum_bytes)
    whole, by_blocks = least
    assert whole < by_blocks
    plain = copy.deepcopy(model)
    planner.within(model, (whole + by_blocks) // 2, optimizer="sgd", hold_output=True,
                   time_limit=1)
    for each in (model, plain):
        each(*inputs)["loss"].backward()
    assert_same_gradients(model, plain)
    plan = planner.plan_of(model)
    assert not plan.spec.blocks
    assert plan.peak_bytes <= plan.budget_bytes
