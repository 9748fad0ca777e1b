"""The breakdown of a whole training loop against real ones, measured by the allocator's events."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.step.loop_trace import StepPhase
from tests.support.loops import (
    IDS,
    Network,
    RealLoop,
    adamw,
    check,
    deviations,
    loss_fn,
    momentum,
    resident_error_bytes,
)
from tests.support.models import BUILDERS


@pytest.mark.compat
@pytest.mark.parametrize(("name", "size", "optimizer", "options"), [
    ("gpt2", {"layers": 1, "batch": 2, "seq": 32}, torch.optim.RMSprop, {"accumulation": 2}),
    ("bert", {"layers": 1, "batch": 2, "seq": 32}, torch.optim.Adafactor,
     {"autocast": torch.bfloat16}),
    ("resnet", {"batch": 4, "image": 32}, torch.optim.Adam,
     {"autocast": torch.bfloat16, "set_to_none": False})])
def test_models_with_embeddings_attention_and_convolutions(name, size, optimizer, options):
    case = BUILDERS[name](**size)

    def make(model):
        return optimizer(model.parameters(), lr=1e-4)

    report = planner.memory(case.model, case.inputs, loss_fn=case.loss_fn,
                            optimizer=make(case.model), **options)
    measured = RealLoop(case.model, case.inputs, case.loss_fn, make, **options).measure()
    for phase, off in deviations(report.breakdown, measured).items():
        assert abs(off) < 0.01, (phase, off)
    assert resident_error_bytes(report.breakdown, measured) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation": 3},
        {"hold_output": "backward", "accumulation": 3},
        {"zero_grad": "before_backward", "accumulation": 2},
        {"zero_grad": "before_backward", "set_to_none": False},
        {"accumulation": 2, "set_to_none": False, "grad_clip": 0.1},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_every_way_of_going_about_a_step(options):
    check(momentum, **options)


@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.float16, True)])
def test_autocast_and_a_scaler(dtype, scaled):
    check(adamw(foreach=True), autocast=dtype, grad_scaler=scaled,
          grad_clip=1.0 if scaled else None)


def test_a_fused_step_with_a_scaler():
    check(adamw(fused=True), autocast=torch.float16, grad_scaler=True)


def test_pure_bfloat16():
    report = check(adamw(), model=Network(torch.bfloat16))
    assert report.resident.optimizer == pytest.approx(2 * report.resident.parameters, rel=0.1)


def test_the_output_of_a_loop_that_is_no_function_is_there_in_the_next_forward():
    report = check(momentum, hold_output="loop")
    model = Network()
    usual = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=momentum(model))
    logits = 4 * IDS.numel() * 200
    assert (report.steady["forward"].peak_bytes
            == usual.steady["forward"].peak_bytes + logits + 4)  # and the loss
    assert report.first["forward"].peak_bytes == usual.first["forward"].peak_bytes


def test_frozen_parameters_have_neither_gradient_nor_state():
    def groups(model):
        return torch.optim.Adam([
            {"params": model.layers.parameters()},
            {"params": [*model.wide.parameters(), *model.head.parameters()], "amsgrad": True}],
                                lr=1e-3)

    model = Network()
    for frozen in (model.embed, model.norm):
        frozen.requires_grad_(False)
    report = check(groups, model=model)
    layers = sum(p.numel() for p in model.layers.parameters())
    rest = sum(p.numel() for m in (model.wide, model.head) for p in m.parameters())
    assert report.resident.optimizer == pytest.approx(4 * (2 * layers + 3 * rest), abs=200)


def test_gradients_that_no_optimizer_resets_stay():
    """A forgotten group: its gradients are added to for ever."""
    report = check(lambda model: torch.optim.SGD(model.wide.parameters(), lr=1e-3))
    model = Network()
    forgotten = sum(p.numel() for m in (model.embed, model.layers, model.norm, model.head)
                    for p in m.parameters())
    assert report.resident.gradients == 4 * forgotten


def test_without_an_optimizer():
    report = check(None, accumulation=2)
    assert [phase.phase for phase in report.first.phases] == [
        StepPhase.FORWARD, StepPhase.LOSS, StepPhase.BACKWARD, StepPhase.OPTIMIZER_STEP,
        StepPhase.NEXT_ITERATION]
    assert report.optimizer is None and "no optimizer was given" in str(report)


class EightBit(torch.optim.Optimizer):
    """Momentum in one byte per element with a scale per tensor."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["code"] = torch.zeros_like(p, dtype=torch.int8)
                    state["scale"] = torch.zeros((), dtype=p.dtype)
                full = state["code"].to(p.dtype).mul_(state["scale"]).mul_(0.9).add_(p.grad)
                state["scale"] = full.abs().max() / 127
                state["code"] = (full / state["scale"]).to(torch.int8)
                p.add_(full, alpha=-group["lr"])


def test_an_optimizer_of_the_users_own_that_makes_its_state_anew():
    report = check(lambda model: EightBit(model.parameters()))
    reached = sum(p.numel() for n, p in Network().named_parameters() if "unused" not in n)
    assert report.resident.optimizer == pytest.approx(reached, rel=0.01)


def test_master_weights():
    """The model is in half precision; the optimizer updates copies in full precision."""
    def on_copies(model):
        return torch.optim.AdamW([p.detach().clone().float() for p in model.parameters()
                                  ], lr=1e-3)

    def step(model, optimizer):
        copies = optimizer.param_groups[0]["params"]
        for ours, theirs in zip(model.parameters(), copies, strict=True):
            if ours.grad is not None:
                theirs.grad = ours.grad.float()
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), copies, strict=True):
                ours.copy_(theirs)
                theirs.grad = None

    model = Network(torch.bfloat16)
    model.unused = nn.Identity()
    report = check(on_copies, model=model, step=step)
    elements = sum(p.numel() for p in model.parameters())
    assert report.resident.optimizer == pytest.approx(12 * elements, abs=200)
    assert report.steady["optimizer step"].memory.gradients == 6 * elements


def test_a_state_that_is_there_already_makes_the_first_step_like_any_other():
    model = Network()
    optimizer = momentum(model)
    loss_fn(model(IDS)).backward()
    optimizer.step()
    optimizer.zero_grad()
    report = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=optimizer)
    assert [p.memory for p in report.first.phases] == [p.memory for p in report.steady.phases]
    fresh = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=momentum(model))
    assert fresh.steady.phases[-1].memory == report.steady.phases[-1].memory


def test_inference_is_the_forward_without_what_the_backward_needs():
    from planner._graph_capture.memory.allocator import record_peak

    model = Network()
    report = planner.memory(model, (IDS,), loss_fn=loss_fn)
    model.eval()

    def infer():
        with torch.inference_mode():
            return model(IDS)

    resident = report.loading.peak_bytes + report.resident.inputs
    assert report.inference_peak_bytes == pytest.approx(
        resident + record_peak(infer, "cpu").peak_bytes, rel=0.001)
    assert report.inference_peak_bytes < report.first["forward"].peak_bytes
    assert model.norm.training is False
