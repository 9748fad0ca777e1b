"""Plans for CUDA on a machine without it, as users meet them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


class Attention(nn.Module):
    """Two layers of attention by one projection each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            heads = layer(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
        return x + torch.ones(32, device=x.device, dtype=x.dtype)


def made(gpu="A100", **arguments) -> planner.Plan:
    with torch.device("meta"):
        model, x = Attention().to(torch.bfloat16), torch.empty(2, 64, 32, dtype=torch.bfloat16)
    return planner.plan(model, x, device="cuda", gpu=gpu, probe=False,
                        loss_fn=lambda out: out.float().sum(), **arguments)


def test_a_plan_says_which_kernels_it_takes_and_keeps_that_in_its_file(tmp_path):
    plan = made(budget="95%", optimizer="adamw")
    (choice,) = plan.kernels
    assert choice.kernel == "attention by flash" and choice.count == 2
    assert "compute capability 8.0" in choice.rule
    assert "attention by flash" in str(plan) and choice.modules == ""
    plan.save(tmp_path / "plan.json")
    assert planner.load(tmp_path / "plan.json") == plan


def test_figures_of_ones_own_stand_for_a_gpu():
    own = planner.Gpu("GB10", (12, 1), 128 << 30, float32_tflops=31, half_tflops=125,
                      bandwidth_gb=273)
    (choice,) = made(own).kernels
    assert choice.kernel == "attention by flash" and "12.1" in choice.rule
    with pytest.raises(TypeError, match="two whole numbers"):
        planner.Gpu("GB10", "12.1", 1, 1, 1, 1)
    with pytest.raises(ValueError, match="bandwidth_gb must be above 0"):
        planner.Gpu("GB10", (12, 1), 1, 1, 1, 0)


def test_on_a_cpu_such_a_plan_says_that_it_is_for_cuda():
    torch.manual_seed(0)
    model = made().apply(Attention().to(torch.bfloat16))
    with pytest.raises(planner.PlanMismatch, match="the plan was made for cuda, whose kernels"):
        model(torch.randn(2, 64, 32, dtype=torch.bfloat16))


def test_compute_capability_decides_and_memory_says_so():
    assert [made(gpu).kernels[0].kernel for gpu in ("H100", "T4")] == [
        "attention by cudnn", "attention by math"]
    with torch.device("meta"):
        model, x = Attention(), torch.empty(2, 64, 32)
    report = planner.memory(model, x, loss_fn=torch.sum, device="cuda", gpu="T4")
    assert any("attention by efficient: float32" in note for note in report.notes)


def test_the_gpu_that_is_named_counts_for_a_plan_in_memory_and_for_ranks():
    with torch.device("meta"):
        model, x = Attention().to(torch.bfloat16), torch.empty(2, 64, 32, dtype=torch.bfloat16)
    where = {"loss_fn": lambda out: out.float().sum(), "device": "cuda", "probe": False}
    plan = planner.plan(model, x, gpu="H100", **where)  # by cuDNN, which an A100 does not choose
    assert planner.memory(model, x, gpu="H100", plan=plan, **where).peak_bytes > 0
    with pytest.raises(planner.PlanMismatch):
        planner.memory(model, x, gpu="A100", plan=plan, **where)
    ranks = planner.DataParallel("ddp", 2)
    assert planner.data_parallel(model, x, parallel=ranks, gpu="rtx4090", **where).peak_bytes > 0
    assert any("for an A100" in note
               for note in planner.data_parallel(model, x, parallel=ranks, **where).notes)
    with pytest.raises(ValueError, match="unknown gpu 'RTX 9000'; known: B200, H200"):
        planner.data_parallel(model, x, parallel=ranks, gpu="RTX 9000", **where)
