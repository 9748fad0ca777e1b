"""Quantized weights and 8-bit optimizers of bitsandbytes and torchao, where they are installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.fake_copies.fake import make_fake_copy
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.op_costs.costs import OpCosts
from planner._graph_capture.optimizer.step import trace_optimizer_steps
from tests.support.quantized import four_bit, int8

pytestmark = pytest.mark.filterwarnings("default")  # which both libraries raise


class Block(nn.Module):
    def __init__(self, quantize):
        super().__init__()
        self.base = quantize(nn.Linear(128, 128, bias=False))
        self.down, self.up = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def model_of(quantize):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(quantize) for _ in range(5)), nn.Linear(128, 1))


def loss_of(output):
    return output.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [four_bit, int8])
def test_a_quantized_base_trains_as_planned(quantize):
    plain, model = model_of(quantize), model_of(quantize)
    x = torch.randn(96, 128)
    plan = planner.plan(model, x, budget="75%", loss_fn=loss_of)
    planned = plan.apply(model)
    for each in (plain, planned):
        loss_of(each(x)).backward()
    for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None)
        assert expected.grad is None or torch.equal(expected.grad, found.grad)
    planned.zero_grad()

    def step():
        output = planned(x)
        loss_of(output).backward()

    assert record_peak(step, "cpu").peak_bytes == plan.peak_bytes - plan.resident_bytes


def held_bytes(optimizer):
    tensors = strided_tensors([value for name, value in vars(optimizer).items()
                               if name != "param_groups"])
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw8bit", "lion8bit", "paged_adamw8bit", "adamw4bit",
                                  "adamwfp8"])
def test_state_and_step_of_small_optimizers(name):
    pytest.importorskip("torchao.optim" if "4bit" in name or "fp8" in name else "bitsandbytes")
    from planner._graph_capture.optimizer.named import make_optimizers

    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 96))
    (optimizer,) = make_optimizers(name, list(model.parameters()), ())
    memory = trace_optimizer_steps(optimizer, make_fake_copy(model, (torch.ones(2, 256),)),
                                   workspace=OpCosts(torch.device("cpu")).workspace_bytes)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
        assert held_bytes(optimizer) == memory.state_bytes
        assert record_peak(optimizer.step, "cpu").peak_bytes == memory.step_peak_bytes
