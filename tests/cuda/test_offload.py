"""Results stored in pinned memory of the host, against CUDA: `make cuda`, on a machine with an
NVIDIA GPU.  Where there is none all of it is skipped."""

from __future__ import annotations

import pytest
import torch

import planner
from planner._apply import host_store
from tests.support.models import BUILDERS
from tests.support.training import plan_or_smallest

pytestmark = [pytest.mark.cuda,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet"])
def test_a_plan_with_offload_holds_on_the_gpu(name):
    with torch.device("cuda"):
        case = BUILDERS[name](batch=16)
    plan = plan_or_smallest(case.model, case.inputs, budget="60%", loss_fn=case.loss_fn,
                            allow="offload", time_limit=20)
    assert plan.offloaded_bytes > 0
    found = planner.verify(case.model, plan, case.inputs, loss_fn=case.loss_fn)
    assert found.ok and found.peak_bytes <= plan.peak_bytes, str(found)
    assert found.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)


def test_a_tensor_survives_the_way_beside_work_that_reuses_its_memory():
    tensor = torch.randn(1 << 24, device="cuda")
    expected = tensor.clone()
    for _ in range(5):
        away = host_store.begin_store(tensor)
        del tensor
        host = host_store.finish(away)
        del away
        assert host.is_pinned()
        noise = torch.full_like(expected, torch.nan)  # where the tensor was
        del noise
        coming = host_store.begin_fetch(host, expected.device)
        tensor = host_store.finish(coming)
        del coming
        assert torch.equal(tensor, expected)
    begun = torch.cuda.memory_allocated()
    copy = host_store.begin_store(tensor)
    del tensor
    assert torch.cuda.memory_allocated() == begun
    host_store.finish(copy)
    del copy
    assert torch.cuda.memory_allocated() < begun
