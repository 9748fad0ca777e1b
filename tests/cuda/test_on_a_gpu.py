"""What is predicted of CUDA, against CUDA: `make cuda`, on a machine with an NVIDIA GPU.

The oracles are torch's allocator (what it was asked for), torch's own choice of kernels, the plain
model's gradients, and a process that sees no GPU.  Where there is no GPU all of it is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from itertools import product

import pytest
import torch

import planner
from planner._graph_capture.device_kernels.attention import AttentionCall, choose_attention
from planner._graph_capture.memory.allocator import record_peak, record_peak_of_op
from planner._graph_capture.op_costs.cuda_workspace import cuda_workspace_bytes
from planner._graph_capture.op_costs.devices import device_model
from tests.support.models import BUILDERS
from tests.support.training import plan_or_smallest

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:TensorFloat32"),
              pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

EAGER = ("gpt2", "llama", "bert", "vit", "t5", "resnet", "unet")
COMPILED = ("gpt2", "llama", "resnet")
GRID = [*product(EAGER, ("eager",), (None, "80%", "60%"), (None, "bf16")),
        *product(COMPILED, ("inductor",), (None, "60%"), (None, "bf16"))]


def case_on_gpu(name: str, **sizes: int):
    with torch.device("cuda"):  # what a loss holds, too
        case = BUILDERS[name](**sizes)
    return case.model, case.inputs, case.loss_fn


@pytest.mark.parametrize(("name", "backend", "budget", "autocast"), GRID)
def test_a_plan_holds_on_the_gpu(name, backend, budget, autocast):
    model, inputs, loss_fn = case_on_gpu(name)
    plan = plan_or_smallest(  # cuBLAS alone takes more than so small a model
        model, inputs, budget=budget, loss_fn=loss_fn, optimizer="adamw", backend=backend,
        autocast=autocast, time_limit=20)
    found = planner.verify(model, plan, inputs, loss_fn=loss_fn)
    assert found.ok, str(found)
    assert found.rng_equal and found.peak_bytes <= plan.peak_bytes
    if backend == "eager":
        assert found.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_loop_of_several_lengths_stays_within_its_budget(optimizer, autocast):
    model, inputs, _ = case_on_gpu("gpt2", batch=32, seq=64)
    ids = inputs["input_ids"]
    batches = [ids[:, :length].clone() for length in (64, 64, 40, 52, 33, 64)]
    stepper = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](
        model.parameters(), lr=1e-3)
    planner.within(model, "85%", optimizer=stepper)
    for number, batch in enumerate(batches):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        del loss
        plan = planner.plan_of(model)
        peak_bytes = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        if number > 0:  # before, how the step ends is not known
            assert peak_bytes <= plan.peak_bytes <= plan.budget_bytes, (number, str(plan))
            if len(batch[0]) == 64:
                assert peak_bytes == pytest.approx(plan.peak_bytes, rel=0.001), number


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_plain_loop_takes_what_is_predicted(name, optimizer):
    model, inputs, loss_fn = case_on_gpu(name)
    stepper = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](
        model.parameters(), lr=1e-3)
    report = planner.memory(model, inputs, loss_fn=loss_fn, optimizer=stepper)

    def step() -> None:
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        (output.loss if loss_fn is None else loss_fn(output)).backward()
        stepper.step()
        stepper.zero_grad()

    step()
    step()
    above = record_peak(step, "cuda").peak_bytes
    steady = report.steady
    assert above == pytest.approx(steady.peak_bytes - report.resident_bytes, rel=0.01)


CALLS = [*product((torch.float32, torch.bfloat16, torch.float16), (40, 64, 80, 128, 256),
                  (None, "mask"), (0.0, 0.1, 0.125), (False, True), (False, True))]


KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Kernels of attention by the number that torch gives them."""


def test_attention_is_chosen_as_torch_chooses():
    wrong = []
    capability = torch.cuda.get_device_capability()
    for dtype, size, mask, dropout, causal, grouped in CALLS:
        if mask and causal:
            continue
        query = torch.empty(2, 8, 96, size, dtype=dtype, device="cuda", requires_grad=True)
        key = torch.empty(2, 2 if grouped else 8, 96, size, dtype=dtype, device="cuda")
        bias = torch.empty(2, 1, 96, 96, dtype=dtype, device="cuda") if mask else None
        ours = choose_attention(
            AttentionCall(query, key, key, bias, dropout, causal, grouped), capability)
        theirs = KERNELS[torch._fused_sdp_choice(
            query, key, key, bias, dropout, causal, enable_gqa=grouped)]
        if ours.kernel != theirs:
            wrong.append((dtype, size, mask, dropout, causal, grouped, ours, theirs))
    assert wrong == []


@pytest.mark.parametrize(("dtype", "size", "groups"), [
    (torch.bfloat16, 64, 8), (torch.bfloat16, 128, 2), (torch.float32, 64, 8)])
def test_workspace_of_attention_is_within_what_is_counted_without_a_gpu(dtype, size, groups):
    query, grad = (torch.randn(2, 8, 1000, size, dtype=dtype, device="cuda") for _ in range(2))
    key, value = (torch.randn(2, groups, 1000, size, dtype=dtype, device="cuda") for _ in range(2))
    aten, made = torch.ops.aten, []
    if dtype is torch.float32:
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True)
        op = aten._scaled_dot_product_efficient_attention_backward.default
        args = (grad, query, key, value, None, out, lse, seed, offset, 0.0, [True] * 3 + [False])
    else:
        out, lse, *between, _ = aten._scaled_dot_product_flash_attention(query, key, value)
        op = aten._scaled_dot_product_flash_attention_backward.default
        args = (grad, query, key, value, out, lse, *between[:4], 0.0, False, *between[4:])
    made.append(op(*args))
    record = record_peak_of_op(lambda: made.append(op(*args)), torch.device("cuda", 0))
    measured = record.peak_bytes - record.end_bytes
    here = device_model("cuda").gpu
    counted = cuda_workspace_bytes(op._schema.name.removeprefix("aten::"), args, here)
    assert counted is not None and measured <= counted * 1.05 + 4096
    assert measured >= counted / 2


SCRIPT = """
    import hashlib, sys, torch, planner
    from tests.support.models import BUILDERS
    here, where = torch.cuda.is_available(), {}
    with torch.device("cuda" if here else "cpu"):
        case = BUILDERS[sys.argv[1]]()
    assert here == (not sys.argv[2])
    if not here:
        where = {"device": "cuda", "gpu": sys.argv[2]}
    plan = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, optimizer="adamw",
                        probe=False, autocast=sys.argv[3] or None, **where)
    graph = repr([(op.name, op.digest) for op in plan.spec.ops])
    print(hashlib.sha256(graph.encode()).hexdigest(), plan.baseline_peak_bytes, plan.peak_bytes,
          ",".join(each.kernel for each in plan.kernels if not each.kernel.endswith("math")))
"""  # on the GPU a composed attention is not one op


@pytest.mark.parametrize("autocast", ["", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "resnet"])
def test_a_plan_made_without_the_gpu_is_the_one_made_on_it(name, autocast):
    product_name = torch.cuda.get_device_name()
    lines = []
    for gpu, visible in ((product_name, ""), ("", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))):
        lines.append(subprocess.run(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), name, gpu, autocast],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": visible}, capture_output=True, text=True,
            check=True).stdout.split("\n")[-2])
    assert lines[0] == lines[1]


def test_code_that_selects_by_values_is_planned():
    class Selecting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 256), torch.nn.Linear(256, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            return self.second(h[h.sum(-1) > 0]).sum() + h.square().mean() * (x.sum().item() > 0)

    losses = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = Selecting().cuda()
        if is_planned:
            planner.within(net, "100%")
        loss = net(torch.randn(512, 64, device="cuda"))
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert planner.status(net).planned_steps == planner.status(net).steps == 1
