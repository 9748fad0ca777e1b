"""The report of a loop's memory: under a plan, its sums, its errors."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

import planner
from planner.step.categories import CATEGORIES
from planner.training_loop.report import breakdown_of
from tests.support.loops import (
    IDS,
    Network,
    RealLoop,
    adamw,
    deviations,
    loss_fn,
    momentum,
    resident_error_bytes,
)


@pytest.fixture(scope="module")
def report():
    model = Network()
    return planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=momentum(model))


@pytest.fixture(scope="module")
def planned():
    model = Network()
    return model, planner.plan(model, (IDS,), loss_fn=loss_fn, optimizer=adamw()(model),
                               budget="85%", time_limit=5)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_planned_loop_takes_what_the_real_one_does(planned, accumulation):
    model, plan = planned
    report = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=adamw()(model), plan=plan,
                            accumulation=accumulation)
    assert report.planned
    if accumulation == 1:
        assert report.steady.peak_bytes == report.peak_bytes == plan.peak_bytes
        assert report.resident_bytes == plan.resident_bytes
        assert report.memory == plan.memory
    applied = plan.apply(copy.deepcopy(model))
    loss_fn(applied(IDS)).backward()  # compiles
    applied.zero_grad()
    measured = RealLoop(applied, (IDS,), loss_fn, adamw(), accumulation=accumulation).measure()
    for phase, off in deviations(report.breakdown, measured).items():
        assert abs(off) < 0.003, (phase, off)
    assert resident_error_bytes(report.breakdown, measured) == 0


def test_a_plan_of_another_step_is_refused(planned):
    model, plan = planned
    with pytest.raises(planner.PlanMismatch, match=r"another step: `\w+` is"):
        planner.memory(model, (IDS[:8],), loss_fn=lambda y: y.square().mean(), plan=plan)
    with pytest.raises(planner.PlanMismatch):
        planner.memory(Network(torch.bfloat16), (IDS,), loss_fn=loss_fn, plan=plan)


def test_a_plan_for_inductor_is_refused_with_what_to_do(planned):
    model, plan = planned
    with pytest.raises(ValueError, match="are the breakdown"):
        planner.memory(model, (IDS,), loss_fn=loss_fn, plan=replace(plan, backend="inductor"))


def test_categories_phases_and_holders_account_for_every_byte(report):
    phases = (report.loading, *report.first.phases, *report.steady.phases)
    for phase in phases:
        assert list(phase.memory) == list(CATEGORIES)
        assert phase.memory.total_bytes == phase.peak_bytes
    assert report.peak_bytes == max(phase.peak_bytes for phase in phases)
    assert sum(holder.size_bytes for holder in report.holders) == report.peak_bytes
    model = Network()
    assert report.resident.parameters == sum(4 * p.numel() for p in model.parameters())
    assert report.resident.buffers == 4 * 64 * 2 + 8


def test_blocks_know_the_module_that_made_them_in_the_forward_and_the_backward(report):
    made = {(block.op, block.module) for block in report.trace.trace.blocks}
    assert {("aten.tanh", "layers.1"), ("aten.tanh", "")} & made == {("aten.tanh", "")}
    assert ("aten.gelu", "wide.1") in made and ("aten.gelu_backward", "wide.1") in made
    assert ("aten.addmm", "wide.0") in made and ("aten.native_batch_norm", "norm") in made
    assert ("aten.embedding_dense_backward", "embed") in made
    gradients = {block.label: block.module for block in report.trace.trace.blocks
                 if block.category == "gradients"}
    assert gradients["wide.0.weight"] == "wide.0" and "unused.weight" not in gradients


def test_the_dictionary_is_json_and_the_text_names_the_peak(report):
    document = json.loads(json.dumps(report.to_dict()))
    assert document["peak_bytes"] == report.peak_bytes
    assert [phase["phase"] for phase in document["later_steps"]] == [
        "forward", "loss", "backward", "optimizer step", "next iteration"]
    text = str(report)
    assert f"{report.peak_bytes:,} bytes" in text and "SGD" in text
    assert max(map(len, text.splitlines())) <= 100


def test_nothing_of_the_model_or_the_optimizer_changes():
    model = Network()
    optimizer = adamw(foreach=True)(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    first = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=optimizer)
    again = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=optimizer)
    assert first.trace == again.trace and breakdown_of(first.trace) == again.breakdown
    assert not optimizer.state and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_a_device_that_is_not_here_is_told():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    report = planner.memory(Network(), (IDS,), loss_fn=loss_fn, device="cuda", autocast="bf16")
    assert report.device == "cuda:0"
    assert any("compute capability 8.0" in note for note in report.notes)
    assert any("for an A100" in note for note in report.notes)


def test_an_optimizer_of_another_model_is_told():
    report = planner.memory(Network(), (IDS,), loss_fn=loss_fn, optimizer=momentum(Network()))
    assert any("are no parameters of the model" in note for note in report.notes)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"optimizer": "adamv"}, ValueError, "unknown optimizer 'adamv'; expected one of"),
        ({"optimizer": 3}, TypeError, "expected an optimizer of torch.*got int"),
        ({"accumulation": 0}, ValueError, "accumulation must be at least 1, got 0"),
        ({"accumulation": 1.5}, TypeError, "accumulation must be a whole number"),
        ({"grad_clip": -1.0}, ValueError, "grad_clip must be above 0"),
        ({"grad_clip": "1"}, TypeError, "grad_clip must be a number"),
        ({"autocast": "int8"}, ValueError, "autocast must be 'bf16' or 'fp16'"),
        (
            {"hold_output": "ever"},
            ValueError,
            "unknown hold_output 'ever'; known: True, False, backward",
        ),
        ({"zero_grad": "never"}, ValueError, "unknown zero_grad 'never'"),
        ({"loss_fn": 3}, TypeError, "loss_fn must be a function"),
        (
            {"optimizer": "sparseadam"},
            planner.CaptureError,
            "cannot trace a step of the optimizer SparseAdam: .* the model has none",
        ),
        ({"loss_fn": lambda y: y}, planner.CaptureError, "expected one element"),
    ],
)
def test_what_is_wrong_is_said(options, error, text):
    with pytest.raises(error, match=text):
        planner.memory(Network(), (IDS,), **{"loss_fn": loss_fn, **options})


@pytest.mark.slow
def test_a_plan_for_accumulation_counts_the_gradients_from_before():
    model = Network()
    call = {"loss_fn": loss_fn, "optimizer": adamw()(model), "accumulation": 3}
    unlimited = planner.plan(model, (IDS,), **call)
    budget = int(0.9 * unlimited.peak_bytes)
    plan = planner.plan(model, (IDS,), budget=budget, time_limit=5, **call)
    assert plan.peak_bytes <= budget and any("micro-batches add up" in note for note in plan.notes)
    plain = planner.memory(model, (IDS,), hold_output="backward", **call)
    assert plan.baseline_peak_bytes == plain.peak_bytes
    report = planner.memory(model, (IDS,), plan=plan, hold_output="backward", **call)
    assert report.peak_bytes == plan.peak_bytes and report.memory == plan.memory
    applied = plan.apply(copy.deepcopy(model))
    loss_fn(applied(IDS)).backward()  # compiles
    applied.zero_grad()
    measured = RealLoop(applied, (IDS,), loss_fn, adamw(), accumulation=3,
                        hold_output="backward").measure()
    assert max(map(abs, deviations(report.breakdown, measured).values())) < 0.003
    once = planner.plan(model, (IDS,), loss_fn=loss_fn, optimizer=adamw()(model))
    gradients = 4 * sum(p.numel() for n, p in model.named_parameters() if "unused" not in n)
    assert (unlimited.forward_backward_peak_bytes
            == once.forward_backward_peak_bytes + gradients)
    assert unlimited.optimizer_step_peak_bytes == once.optimizer_step_peak_bytes
    with pytest.raises(planner.InfeasibleBudget, match="gradients of earlier micro-batches"):
        planner.plan(model, (IDS,), budget=once.resident_bytes, time_limit=5, **call)
