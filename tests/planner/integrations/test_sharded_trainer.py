"""Budgets in the Trainer of transformers whose model is sharded, on two ranks: by the Trainer's
`fsdp=` or by transformers as the model is loaded."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import planner
from benchmarks.settled_collectives import settle_collectives
from planner._graph_capture.torch_compat import begin_stage
from tests.support.ranks import on_ranks
from tests.support.stages import record_stages

accelerate = pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
transformers = pytest.importorskip("transformers")

from planner.integrations.transformers import MemoryBudgetCallback  # noqa: E402

STEPS = 3


class Staged(transformers.TrainerCallback):
    """Each step of the optimizer is a stage of the measurement."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        for unit in kwargs["model"].modules():
            if isinstance(unit, FSDPModule):
                settle_collectives(unit)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        begin_stage()


class Noting(transformers.Trainer):
    """Keeps its losses."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=256, max_position_embeddings=64))


def train(
    folder: str, by: str, micro_batches: int, budget: str | None
) -> tuple[list[float], int, nn.Module]:
    """Losses, the most that this rank takes after the first step, the model."""
    settings: dict[str, Any] = {} if by == "loading" else {
        "fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    arguments = transformers.TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        save_strategy="no", ddp_backend="gloo", disable_tqdm=True, logging_strategy="no",
        gradient_accumulation_steps=micro_batches, **settings)
    if by == "loading":
        from transformers.distributed import DistributedConfig

        net = transformers.LlamaForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(fsdp_size=2))
    else:
        net = model()
        # With ranks on CPUs accelerate leaves its plugin for FSDP out, not with those on GPUs.
        accelerate.state.PartialState._shared_state["distributed_type"] = (
            accelerate.utils.DistributedType.MULTI_GPU)
    rows = torch.randint(256, (64, 32), generator=torch.Generator().manual_seed(0))
    trainer = Noting(net, arguments, train_dataset=[{"input_ids": row, "labels": row}
                                                    for row in rows],
                     callbacks=[Staged()] + ([] if budget is None else [
                         MemoryBudgetCallback(budget, time_limit=2)]))
    trainer.losses = []
    there = 0 if by == "trainer" else sum(p.to_local().nbytes for p in net.parameters())
    peaks = [record.peak_bytes for record in record_stages([trainer.train])]
    assert isinstance(net, FSDPModule) and len(peaks) == 1 + STEPS
    return trainer.losses, there + max(peaks[2:]), net


def sharded(rank: int, folder: str, by: str, micro_batches: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    if rank == 0:
        model().save_pretrained(folder)
    dist.barrier()
    plain, plain_bytes, _ = train(folder, by, micro_batches, None)
    losses, size_bytes, net = train(folder, by, micro_batches, "80%")
    plan = planner.plan_of(net)
    assert losses == plain and planner.steps_of(net).planned == len(losses)
    assert plan.parallel.kind == "fsdp2" and "model.layers.0" in plan.parallel.units
    assert plan.parallel.requires_gradient_sync is (micro_batches == 1)
    # Batches that accelerate fetches ahead are not seen on ranks.
    ahead_bytes = micro_batches * 2 * 8 * 32 * 8
    assert size_bytes - ahead_bytes <= plan.budget_bytes < plain_bytes, (
        size_bytes, plan.budget_bytes)
    assert size_bytes == pytest.approx(plan.peak_bytes, rel=0.01), (size_bytes, plan.peak_bytes)
    assert plain_bytes == pytest.approx(plan.baseline_peak_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("by", "micro_batches"), [("trainer", 1), ("loading", 2)])
def test_a_sharded_model_is_trained_within_a_budget(by, micro_batches, tmp_path):
    on_ranks(sharded, str(tmp_path), by, micro_batches)
