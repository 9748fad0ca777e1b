"""Steps that evaluate the model themselves, and steps of several optimizers, against real loops."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.optimizer.trajectory import OptimizerTrajectory, needs_closure
from tests.support.loops import IDS, Network, check, loss_fn
from tests.support.stages import record_stages

STEPS = 4


def lbfgs(model, **options):
    return torch.optim.LBFGS(model.parameters(), **{
        "lr": 0.1, "history_size": 4, "max_iter": 4, "tolerance_change": 0.0,
        "tolerance_grad": 0.0, **options})


def measured(model, make, accumulation=1, set_to_none=True, grad_clip=None):
    """Peak and end of each step of a real loop by closures, above the model and the batch."""
    held = []

    def closure():
        (optimizer,) = held
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(accumulation):
            output = model(IDS)
            loss = loss_fn(output)
            loss.backward()
        if grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        return loss

    def step():
        loss = held[0].step(closure)
        assert loss.isfinite()

    _, *records = record_stages([lambda: held.append(make(model)), *[step] * STEPS])
    return [(record.peak_bytes, record.end_bytes) for record in records]


@pytest.mark.parametrize(("options", "loop"), [
    ({"max_iter": 1, "history_size": 2}, {}), ({}, {"accumulation": 3, "set_to_none": False}),
    ({}, {"grad_clip": 1e3})])
def test_lbfgs_against_a_real_loop(options, loop):
    model = Network()
    report = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=lbfgs(model, **options),
                            **loop)
    peaks = measured(copy.deepcopy(model), lambda model: lbfgs(model, **options), **loop)
    base = report.loading.peak_bytes + report.resident.inputs
    assert report.first.peak_bytes == pytest.approx(base + peaks[0][0], rel=0.001)
    assert report.steady.peak_bytes == pytest.approx(base + peaks[-1][0], rel=0.001)
    assert report.resident_bytes == base + peaks[-1][1]
    assert "evaluates the model itself" in report.notes[-1]


def test_a_line_search_is_taken_to_close_in_on_its_step():
    """Brackets of a step hold more gradients; a real run may do without."""
    model = Network()
    report = planner.memory(model, (IDS,), loss_fn=loss_fn,
                            optimizer=lbfgs(model, line_search_fn="strong_wolfe"))
    peaks = measured(copy.deepcopy(model), lambda model: lbfgs(
        model, line_search_fn="strong_wolfe"))
    base = report.loading.peak_bytes + report.resident.inputs
    gradient = sum(4 * p.numel() for p in model.parameters())
    spared = report.steady.peak_bytes - base - max(peak for peak, _ in peaks)
    assert any(spared == pytest.approx(count * gradient, abs=200) for count in range(4))
    assert report.resident_bytes == base + peaks[-1][1]


def test_a_plan_holds_what_lbfgs_holds_while_it_evaluates():
    model = Network()
    report = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=lbfgs(model))
    plan = planner.plan(model, (IDS,), loss_fn=loss_fn, optimizer=lbfgs(model), solver="none")
    assert plan.baseline_peak_bytes == pytest.approx(report.peak_bytes, rel=0.001)
    assert plan.optimizer.state_bytes > report.resident.optimizer


def test_the_course_fills_the_history_and_never_ends_early():
    """By default 20 iterations to a step, 100 pairs of the history: after six steps it is full."""
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))])
    trajectory = OptimizerTrajectory(optimizer)
    for _ in range(7):
        assert trajectory.step()
    assert trajectory.evaluations == 7 * 20 and not optimizer.state
    assert needs_closure(optimizer) and not needs_closure(torch.optim.SGD([torch.zeros(1)]))


def matrices_and_rest(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]


class Both(torch.optim.Optimizer):
    """Several optimizers behind the face of one, as a real loop has them in a row."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self, closure=None):
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none=True):
        for each in self.optimizers:
            each.zero_grad(set_to_none)


@pytest.mark.parametrize("options", [
    {"accumulation": 2, "set_to_none": False}, {"grad_clip": 1.0, "autocast": torch.bfloat16}])
def test_muon_beside_adamw(monkeypatch, options):
    model = Network()
    report = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer=matrices_and_rest(model),
                            **options)
    by_name = planner.memory(model, (IDS,), loss_fn=loss_fn, optimizer="muon", **options)
    assert report.optimizer == by_name.optimizer == "Muon + AdamW"
    assert report.breakdown == by_name.breakdown
    monkeypatch.setattr(planner, "memory", lambda *args, **kwargs: report)
    check(lambda model: Both(matrices_and_rest(model)), model=model, **options)


def test_what_cannot_be_had_is_said():
    model = Network()
    memory = {"model": model, "inputs": (IDS,), "loss_fn": loss_fn}
    with pytest.raises(planner.CaptureError, match="makes no steps that take a closure"):
        planner.memory(**memory, optimizer=lbfgs(model), grad_scaler=True)
    with pytest.raises(planner.CaptureError, match="for one optimizer alone"):
        planner.memory(**memory, optimizer=[lbfgs(model), torch.optim.SGD(model.parameters())])
    with pytest.raises(TypeError, match="are expected as instances, each with its own"):
        planner.memory(**memory, optimizer=[torch.optim.SGD])
    with pytest.raises(planner.CaptureError, match="Muon takes matrices, and the model has none"):
        planner.plan(nn.BatchNorm1d(4), torch.randn(3, 4), loss_fn=torch.sum, optimizer="muon")



class Sparse(nn.Module):
    """An embedding of which a batch touches few rows, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5000, 64, sparse=True)
        self.head = nn.Linear(64, 4)

    def forward(self, ids):
        return torch.tanh(self.head(self.embed(ids)))


TOUCHED = torch.arange(16 * 32).remainder(100).view(16, 32)


def sparse_and_rest(model):
    return [torch.optim.SparseAdam(model.embed.parameters()),
            torch.optim.Adam(model.head.parameters())]


def test_sparse_gradients_beside_dense_ones():
    model = Sparse()
    loop = {"model": model, "inputs": (TOUCHED,), "loss_fn": lambda y: y.square().mean()}
    report = planner.memory(**loop, optimizer=sparse_and_rest(model))
    assert report.breakdown == planner.memory(**loop, optimizer="sparseadam").breakdown
    real, held = copy.deepcopy(model), []

    def step():
        loop["loss_fn"](real(TOUCHED)).backward()
        held[0].step()
        held[0].zero_grad()

    _, first, _, later = record_stages(
        [lambda: held.append(Both(sparse_and_rest(real))), *[step] * 3])
    base = report.loading.peak_bytes + report.resident.inputs
    assert report.first.peak_bytes == pytest.approx(base + first.peak_bytes, rel=0.005)
    assert report.steady.peak_bytes == pytest.approx(base + later.peak_bytes, rel=0.005)
    assert report.resident_bytes == base + later.end_bytes
    # Without the batch's values every row may be another one.
    unknown = planner.memory(**{**loop, "inputs": (TOUCHED.to("meta"),)}, optimizer="sparseadam")
    assert unknown.peak_bytes > report.peak_bytes
    with pytest.raises(planner.CaptureError, match="grows with each micro-batch"):
        planner.memory(**loop, optimizer="sparseadam", accumulation=2)
    with pytest.raises(planner.CaptureError, match="coordinate form"):
        planner.plan(**loop)
