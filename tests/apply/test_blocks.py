"""Plans whose repeated blocks are compiled one by one."""

from __future__ import annotations

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

import planner
from planner._apply.plan_backend import PlanBackend
from planner._graph_capture.dynamo.blocks import find_blocks
from planner.api import capture
from planner.search.planning import plan_within
from planner.step.prepared import PreparedStep
from tests.support.models import BUILDERS, Case, language_model
from tests.support.training import EFFORT, measured_peak, reference, train


def prepared(case: Case) -> PreparedStep:
    return capture(case.model, case.inputs, loss_fn=case.loss_fn, regions="blocks")


def plan_at(step: PreparedStep, share: float) -> planner.Plan:
    """For a share of what the step takes above resident memory, or for the smallest budget."""
    resident = step.resident_bytes
    try:
        return plan_within(
            step, resident + int(share * (step.keep_all_peak_bytes - resident)), EFFORT)
    except planner.InfeasibleBudget as refusal:
        return plan_within(step, refusal.minimum_bytes, EFFORT)


@pytest.mark.parametrize(("name", "size"), [
    pytest.param("language_model", {"layers": 3}, marks=pytest.mark.compat),
    pytest.param("gpt2", {"layers": 2}, marks=pytest.mark.slow),
    pytest.param("lora", {"layers": 2}, marks=pytest.mark.slow),
    pytest.param("autocast", {"layers": 2}, marks=pytest.mark.slow),
    pytest.param("block_twice", {"layers": 2}, marks=pytest.mark.slow),
    pytest.param("resnet", {"stages": 2, "image": 32}, marks=pytest.mark.slow),
])
def test_a_step_by_blocks_gives_the_same_numbers_within_its_budget(name, size):
    case = BUILDERS[name](**size)
    step, plain = prepared(case), reference(case)
    for share in (0.7, 0.0):
        plan = plan_at(step, share)
        model = plan.apply(case.model)
        trace = train(model, case)
        assert trace.distance(plain) <= 1e-6
        assert torch.equal(trace.random_state, plain.random_state)
        assert measured_peak(model, case) == plan.peak_bytes - plan.resident_bytes
        assert plan.peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_autograd_adds_the_gradients_of_a_tied_weight_out_of_place():
    case = BUILDERS["gpt2"](layers=2, seq=16)
    plan = plan_at(prepared(case), 0.0)
    model = plan.apply(case.model)
    train(model, case)
    net = plan.peak_bytes - plan.resident_bytes
    # What a region returned counts to the end of the code that reads it.
    assert measured_peak(model, case) <= net <= 1.02 * measured_peak(model, case)


class BrokenBlock(nn.Module):
    """Its graph ends behind it, as a print or a hook that torch cannot trace would end it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(x)
        torch._dynamo.graph_break()
        return x


class BrokenLoop(nn.Module):
    """torch compiles one code for all but the first of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BrokenBlock(64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.slow
def test_code_that_runs_several_times_has_a_schedule_for_each_run():
    torch.manual_seed(0)
    case = Case(BrokenLoop(), (torch.randn(256, 64),), None)
    step, plain = capture(case.model, case.inputs, regions="model"), reference(case)
    plan = plan_at(step, 0.6)
    assert len({region.insertions for region in plan.spec.regions}) > 2
    model = plan.apply(case.model)
    assert train(model, case).differences(plain) == []
    assert measured_peak(model, case) == plan.peak_bytes - plan.resident_bytes
    assert plan.peak_bytes <= plan.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_graph_break_in_a_loop_is_planned_by_blocks(backend):
    case = Case(BrokenLoop(), (torch.randn(256, 64),), None)
    step = capture(case.model, case.inputs, backend=backend)
    assert any("3 blocks are compiled one by one" in note for note in step.base.graph.notes)
    whole = capture(case.model, case.inputs, backend=backend, regions="model")
    kept = [note for note in whole.base.graph.notes if "2 regions share code" in note]
    assert len(kept) == (backend == "inductor")


def test_layers_may_differ_in_what_they_recompute():
    case = language_model(layers=6)
    plan = plan_at(prepared(case), 0.75)
    again = Counter({f"blocks.{layer}": 0 for layer in range(6)})
    again.update(".".join(row.module.split(".")[:2])
                 for row in plan.decisions if row.action == "recompute")
    assert len(set(again.values())) > 1


@pytest.mark.parametrize("layers", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_equal_decisions_are_compiled_once(layers):
    case = language_model(layers=layers)
    plan = plan_within(prepared(case), None)
    blocks = [region.block for region in plan.spec.regions]
    assert len(blocks) - blocks.count("") == layers
    with mock.patch.object(PlanBackend, "_matching_region", autospec=True,
                           side_effect=PlanBackend._matching_region) as matched:
        train(plan.apply(case.model), case)
    assert matched.call_count == 1 + blocks.count("")


def test_the_applied_model_shares_everything_and_leaves_the_blocks_as_they_are():
    case = language_model(layers=3)
    fields = {name: set(vars(module)) for name, module in case.model.named_modules()}
    model = plan_within(prepared(case), None).apply(case.model)
    assert list(model.state_dict()) == list(case.model.state_dict())
    assert [id(p) for p in model.parameters()] == [id(p) for p in case.model.parameters()]
    assert model.blocks[0] is case.model.blocks[0]
    train(model, case)
    assert {name: set(vars(module)) for name, module in case.model.named_modules()} == fields
    with torch.no_grad():
        assert torch.equal(model(*case.args), case.model(*case.args))
    model.eval()
    with pytest.warns(UserWarning, match="made in train mode"):
        model(*case.args)
    case.model.train()


def test_a_file_keeps_the_blocks(tmp_path):
    case = language_model(layers=3)
    plan = plan_at(prepared(case), 0.8)
    plan.save(tmp_path / "plan.json")
    loaded = planner.load(tmp_path / "plan.json")
    assert loaded == plan
    other = case._replace(model=copy.deepcopy(case.model))
    assert train(loaded.apply(other.model), other).distance(reference(other)) <= 1e-6
    with pytest.raises(planner.PlanMismatch):
        loaded.apply(language_model(layers=2).model)


def test_the_account_of_a_loop_knows_blocks():
    case = language_model(layers=2)
    plan = plan_at(prepared(case), 0.8)
    report = planner.memory(case.model, case.inputs, loss_fn=case.loss_fn, plan=plan,
                            hold_output="step")
    assert report.peak_bytes == plan.peak_bytes


def test_smaller_batches_are_served_by_blocks_too():
    case = language_model(layers=2, batch=5)
    plan = plan_at(prepared(case), 0.7)
    smaller = language_model(layers=2, batch=3)._replace(model=case.model)
    model = plan.apply(case.model)
    assert train(model, smaller).distance(reference(smaller)) <= 1e-6
    assert measured_peak(model, smaller) <= plan.budget_bytes - plan.resident_bytes


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.stages = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
            for _ in range(2))
        self.layers = nn.ModuleDict({name: nn.TransformerEncoderLayer(8, 2) for name in "ab"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_blocks_are_the_outermost_repeated_modules():
    assert find_blocks(Pairs(), "blocks") == ("layers.a", "layers.b")
    assert find_blocks(Pairs().stages, "blocks") == ("0", "1")  # there are none but Sequentials
    assert find_blocks(Pairs(), "model") == ()
    assert find_blocks(Pairs(), "stages.*") == ("stages.0", "stages.1")
    assert find_blocks(Pairs(), ("stem", "layers.a")) == ("stem", "layers.a")
    with pytest.raises(ValueError, match="found no repeated blocks"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "blocks")
    with pytest.raises(ValueError, match="names no module of Pairs"):
        find_blocks(Pairs(), "layer.*")


def test_other_inputs_are_planned_anew_by_blocks_too():
    small, large = language_model(layers=2, batch=2), language_model(layers=2, batch=4)
    large = large._replace(model=small.model)
    sizes: list[int] = []

    def replan(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> planner.Plan:
        sizes.append(len(inputs[0]))
        return plan_within(prepared(large), None)

    model = plan_within(prepared(small), None).apply(small.model, replan=replan)
    for case in (small, large, small, large):
        assert train(model, case).distance(reference(case)) <= 1e-6
    assert sizes == [4]
    assert planner.steps_of(model).planned == 8


class DropsFirst(nn.Module):
    """What comes before the blocks draws random numbers and updates a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.slow
def test_a_step_that_a_plan_turns_out_not_to_serve_begins_anew():
    torch.manual_seed(0)
    model = DropsFirst()
    plain = copy.deepcopy(model)
    applied = planner.plan(model, torch.randn(4, 8), regions="blocks").apply(
        model, replan=lambda model, inputs: planner.plan(model, inputs, regions="blocks"))
    for size in (4, 6, 4, 6):
        x = torch.randn(size, 8)
        state = torch.get_rng_state()
        expected = plain(x)
        torch.set_rng_state(state)
        assert torch.equal(applied(x), expected)
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    assert planner.steps_of(applied).planned == 4
