"""Timing the kernels that Inductor generates, for `cost_model="measured"`."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from planner._graph_capture.torch_compat.inductor import Kernel
from planner.api import capture
from planner.search.planning import plan_within
from tests.support.compiler import needs_compiler
from tests.support.inductor import EFFORT, batch, budget_at, loss_of, make_model

pytestmark = [pytest.mark.compat, needs_compiler, pytest.mark.slow]


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((7,), 3.0))

    def forward(self, x):
        return (x * 2 + 1).relu() * self.weight


def prepare(monkeypatch, tmp_path, model, x):
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    return capture(model, x, loss_fn=loss_of, backend="inductor", cost_model="measured")


def test_the_kernels_that_are_timed_are_those_of_the_step(monkeypatch, tmp_path):
    prepared = prepare(monkeypatch, tmp_path, Scale(), torch.randn(5, 7))
    plan_within(prepared, None)
    breakdown, calls = prepared.base.compiled, []
    monkeypatch.setattr(breakdown.tracer.costs, "seconds_of_kernels",
                        lambda found: calls.extend(found) or 1.0)
    breakdown.seconds(next(iter(breakdown._known)))
    call = calls[0]
    x, weight, out = torch.randn(5, 7), torch.randn(7), torch.empty(5, 7)
    given = {tuple(tensor.shape): tensor for tensor in (x, weight)}
    assert [tuple(tensor.shape) for tensor in call.args[:3]].count((5, 7)) == 2
    operands = [given.pop(tuple(a.shape), out) if isinstance(a, torch.Tensor) else a
                for a in call.args]
    getattr(call.kernel.build()(), call.method)(*operands, **call.kwargs)
    assert torch.allclose(out, (x * 2 + 1).relu() * weight)


def test_overhead_is_the_ratio_of_timed_steps_and_kernels_are_timed_once(monkeypatch, tmp_path):
    prepared = prepare(monkeypatch, tmp_path, make_model(dropout=0.0), batch())
    default = plan_within(prepared, None)
    assert default.overhead == 0.0
    plan = plan_within(prepared, budget_at(prepared, default, 0.7), EFFORT)

    def refuse(kernel):
        raise AssertionError("it was timed before")

    monkeypatch.setattr(Kernel, "build", refuse)
    breakdown = prepared.base.compiled
    breakdown._seconds.clear()
    specs = [next(known for known in breakdown._known
                  if breakdown.with_code(known) == replace(made.spec, ops=(), buffers=()))
             for made in (default, plan)]
    before, after = map(breakdown.seconds, specs)
    assert before > 0
    assert plan.overhead == pytest.approx(after / before - 1)
