"""`planner.within` under DeepSpeed's engine, on its CPU accelerator, on two ranks.

Runs where DeepSpeed is installed (`DS_BUILD_OPS=0 pip install deepspeed`), which the project does
not ask for.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import planner
from tests.support.models import gpt2
from tests.support.ranks import on_ranks
from tests.support.stages import record_stages

pytest.importorskip("deepspeed")

VOCAB, BATCH, RANKS = 256, 8, 2
BUCKET = 50_000
"""Elements of DeepSpeed's buckets, a third of the model's parameters."""


def train(rank: int, stage: int, budget: str | None) -> tuple[list[float], int, nn.Module]:
    """Losses of four steps, the most that this rank takes in later ones, and the model."""
    import deepspeed

    torch.manual_seed(0)
    net = gpt2(layers=3, batch=1, seq=32, width=64, vocab=VOCAB).model.train()
    if budget is not None:
        planner.within(net, budget, time_limit=2, optimizer="adamw",
                       parallel=planner.DataParallel("zero1", RANKS))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET,
                              "allgather_bucket_size": BUCKET}})
    torch.manual_seed(rank)
    losses = []

    def step() -> None:
        ids = torch.randint(VOCAB, (BATCH, 32))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    step()
    step()
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for each in optimizer.state.values() for value in each.values()
             if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in (*net.parameters(), *updated, *state)]
    resident = sum({each._cdata: each.nbytes() for each in storages}.values())
    peaks = [record.peak_bytes for record in record_stages([step, step])]
    return losses, resident + max(peaks), net


def of_a_stage(rank: int, stage: int) -> None:
    start(rank)
    plain, plain_bytes, _ = train(rank, stage, None)
    losses, size_bytes, net = train(rank, stage, "80%")
    plan = planner.plan_of(net)
    assert losses == plain
    assert planner.steps_of(net).planned == 4 and len(plan.spec.blocks) == 3
    assert size_bytes <= plan.budget_bytes < plain_bytes


def of_partitioned_parameters(rank: int) -> None:
    start(rank)
    with pytest.raises(planner.CaptureError, match="partitioned by DeepSpeed"):
        train(rank, 3, "80%")


def start(rank: int) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank),
                      WORLD_SIZE=str(RANKS))
    import deepspeed

    communication: Any = deepspeed
    communication.init_distributed("gloo")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_of_a_stage_is_planned(stage):
    on_ranks(of_a_stage, stage)


@pytest.mark.slow
def test_partitioned_parameters_are_refused():
    on_ranks(of_partitioned_parameters)
