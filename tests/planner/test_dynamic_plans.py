"""Plans for a range of sizes: one trace, the peak at every size as predicted, files that serve them
all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner._apply.symbolic_code import SizedCode
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.module_forward import forward_override
from planner.attached.symbolic_graph import SymbolicGraph
from planner.plans.file import from_dict
from planner.plans.writing import fingerprint
from tests.support.sized_models import Attending, tokens

NAMED = {"tokens": {0: "batch", 1: "length"}}


class Summed(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(),
                                    nn.Linear(32, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows).pow(2).sum()


@pytest.fixture(scope="module")
def rows_plan() -> planner.Plan:
    return planner.plan(Summed(), torch.zeros(120, 8), budget="85%",
                        dynamic={"rows": {0: "count"}})


def measured_peak(applied: nn.Module, inputs: torch.Tensor) -> int:
    """Peak of a step, resident memory included, after one that compiles."""

    def step() -> None:
        applied.zero_grad()
        applied(inputs).backward()

    step()
    resident = sum(each.nbytes for each in (*applied.parameters(), *applied.buffers(), inputs))
    return resident + record_peak(step, "cpu").peak_bytes


def test_it_serves_every_size_of_its_ranges_with_one_trace(rows_plan):
    assert rows_plan.ranges == {"count": (2, 120)}
    plain = Summed()
    applied = rows_plan.apply(plain)
    for count in (120, 2, 64, 119, 64):
        rows = torch.randn(count, 8)
        assert measured_peak(applied, rows) == rows_plan.peak_bytes_at(count=count)
        ours = [each.grad.clone() for each in plain.parameters()]
        plain.zero_grad()
        plain(rows).backward()
        for mine, theirs in zip(ours, plain.parameters(), strict=True):
            assert torch.equal(mine, theirs.grad)
    code, = forward_override(applied)._codes.values()
    assert isinstance(code, SizedCode) and code.compilations == 1


def test_the_largest_size_is_the_planned_one(rows_plan):
    assert rows_plan.peak_bytes_at(count=120) == rows_plan.peak_bytes_at() == rows_plan.peak_bytes


def test_a_file_holds_the_ranges_and_serves_them(rows_plan, tmp_path):
    rows_plan.save(tmp_path / "plan.json")
    loaded = planner.load(tmp_path / "plan.json")
    assert loaded == rows_plan
    assert loaded.peak_bytes_at(count=7) == rows_plan.peak_bytes_at(count=7)
    rows = torch.randn(7, 8)
    assert measured_peak(loaded.apply(Summed()), rows) == loaded.peak_bytes_at(count=7)


def test_verify_compares_with_the_peak_at_the_size_of_the_inputs(rows_plan):
    found = planner.verify(Summed(), rows_plan, torch.randn(33, 8))
    assert found.ok and found.peak_bytes == found.predicted_peak_bytes < rows_plan.peak_bytes


@pytest.mark.parametrize("count", [1, 121])
def test_a_size_out_of_range_is_refused_in_words(rows_plan, count):
    with pytest.raises(planner.PlanMismatch, match=r"count.*2 to 120"):
        rows_plan.peak_bytes_at(count=count)
    with pytest.raises(planner.PlanMismatch, match=r"count is .*2 to 120"):
        rows_plan.apply(Summed())(torch.randn(count, 8))


def test_a_name_that_is_none_of_the_sizes_is_refused(rows_plan):
    with pytest.raises(TypeError, match="no size length; its sizes are count"):
        rows_plan.peak_bytes_at(length=3)
    fixed = planner.plan(nn.Linear(8, 8), torch.zeros(4, 8))
    assert fixed.ranges == {}
    with pytest.raises(TypeError, match="plan with dynamic="):
        fixed.peak_bytes_at(length=3)


def test_another_model_is_refused(rows_plan):
    other = Summed()
    other.layers[1] = nn.ReLU()
    with pytest.raises(planner.PlanMismatch, match="first difference"):
        rows_plan.apply(other)(torch.randn(9, 8))


@pytest.mark.parametrize("change", [
    lambda sizes: sizes["buffer_bytes"].__setitem__(0, "7*count"),
    lambda sizes: sizes["buffer_bytes"].__setitem__(0, "__import__('os').getpid()"),
    lambda sizes: sizes["buffer_bytes"].pop(),
    lambda sizes: sizes["ranges"][0].update(largest=200),
    lambda sizes: sizes["ranges"][0].update(smallest=0),
    lambda sizes: sizes["dimensions"].clear(),
    lambda sizes: sizes["kernels"][0].update(call="aten.from_file.default('x', True, 8)"),
    lambda sizes: sizes["kernels"][0].update(call="print(1)"),
    lambda sizes: sizes["kernels"][0].update(ops=[10 ** 6]),
])
def test_a_file_whose_sizes_do_not_follow_from_its_step_is_refused(rows_plan, change):
    document = rows_plan.to_dict()
    change(document["sizes"])
    document["fingerprint"] = fingerprint(document)
    with pytest.raises(planner.PlanFileError):
        from_dict(document)


def test_understated_bytes_are_refused_when_it_is_applied(rows_plan):
    document = rows_plan.to_dict()
    texts = document["sizes"]["buffer_bytes"]
    place = texts.index("128*count")
    texts[place] = "16*count*count//15"  # the same at the planned size
    document["fingerprint"] = fingerprint(document)
    altered = from_dict(document)
    with pytest.raises(planner.PlanMismatch, match="makes"):
        altered.apply(Summed())(torch.randn(9, 8))


@pytest.mark.parametrize(("dynamic", "words"), [
    ("batch", "dynamic must be True or"),
    ({"rows": 0}, "dynamic must be True or"),
    ({"rows": {"0": "count"}}, "got the dimension '0' of 'rows'"),
    ({"rows": {0: 3}}, "got 3 for dimension 0 of 'rows'"),
    ({"rows": {0: "a size"}}, "must be one of Python's"),
    ({"lines": {0: "count"}}, "dynamic names the input 'lines'.*'rows'"),
    ({"rows": {5: "count"}}, "dimension 5 of 'rows', which has 2"),
    ({"rows": {0: "count", 1: "count"}}, "count is 120 .* and 8"),
])
def test_bad_names_are_refused(dynamic, words):
    with pytest.raises((TypeError, ValueError), match=words):
        planner.plan(Summed(), torch.zeros(120, 8), dynamic=dynamic)


@pytest.mark.parametrize("more", [
    {"backend": "inductor"}, {"allow": "chunk"}, {"regions": "blocks"},
    {"optimizer_in_backward": True, "optimizer": "sgd"}])
def test_what_cannot_be_had_with_it_is_said(more):
    with pytest.raises(ValueError, match="dynamic= cannot be had with"):
        planner.plan(Summed(), torch.zeros(120, 8), dynamic=True, **more)


def test_a_size_that_the_model_fixes_is_named():
    with pytest.raises(planner.CaptureError, match="fixes width"):
        planner.plan(Summed(), torch.zeros(120, 8), dynamic={"rows": {0: "count", 1: "width"}})


def test_true_names_the_sizes_that_may_vary():
    plan = planner.plan(Summed(), torch.zeros(120, 8), dynamic=True)
    assert plan.ranges == {"rows_0": (2, 120)}


@pytest.mark.slow
def test_a_batch_and_a_length_vary_together():
    torch.manual_seed(0)
    model = Attending()
    plan = planner.plan(model, {"tokens": tokens(4, 64)}, budget="70%", dynamic=NAMED,
                        time_limit=1)
    assert plan.ranges == {"batch": (2, 4), "length": (2, 64)}
    applied = plan.apply(model)
    for batch, length in ((4, 64), (2, 2), (3, 33), (4, 17)):
        measured = measured_peak(applied, tokens(batch, length))
        assert measured == plan.peak_bytes_at(batch=batch, length=length)


class Patches(nn.Module):
    """Cuts images into patches, and reads the first of what it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 16, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, 16))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.cut(images).flatten(2).transpose(1, 2)
        rows = torch.cat((self.first.expand(len(images), -1, -1), patches), 1)
        for _ in range(4):
            rows = rows.tanh()
        return rows[:, 0].square().mean()


def test_a_graph_with_symbols_takes_what_one_with_numbers_does():
    """It indexes without copies (`x[:, 0]`), and writes in place where a size is a product."""
    model, images = Patches(), torch.randn(8, 3, 32, 32)
    plan = planner.plan(model, images, dynamic={"images": {0: "batch", 2: "height"}})
    for batch, height in ((8, 32), (5, 16)):
        some = images[:batch, :, :height].clone()
        fixed = planner.plan(model, some)
        assert plan.peak_bytes_at(batch=batch, height=height) == fixed.peak_bytes
        assert measured_peak(plan.apply(model), some) == fixed.peak_bytes


def train(model: nn.Module, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in batches:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def symbolic_of(model: nn.Module) -> list[SymbolicGraph]:
    found: Any = forward_override(model)
    return [graph for graph in found.graphs if isinstance(graph, SymbolicGraph)]


@pytest.mark.parametrize("dynamic", [True, {"rows": {0: "count"}}, None])
def test_within_takes_named_and_marked_sizes_for_symbolic_at_once(dynamic):
    model = planner.within(Summed(), "85%", dynamic=dynamic)
    batch = torch.randn(100, 8)
    if dynamic is None:
        torch._dynamo.mark_dynamic(batch, 0)
    train(model, [batch, torch.randn(60, 8)])
    graph, = symbolic_of(model)
    assert graph.code.compilations == 1
    assert planner.status(model).planned_steps == 2


def test_the_plan_of_a_training_with_other_sizes_is_saved_and_applied(tmp_path):
    model = planner.within(Summed(), "85%")
    plain = Summed()
    train(model, [torch.randn(100, 8), torch.randn(60, 8), torch.randn(80, 8)])
    plan = planner.plan_of(model)
    assert plan is not None and plan.ranges == {"rows_0": (2, 100)}
    plan.save(tmp_path / "plan.json")
    applied = planner.load(tmp_path / "plan.json").apply(plain)
    applied(torch.randn(30, 8)).backward()
    assert planner.steps_of(applied).planned == 1
