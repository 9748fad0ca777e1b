"""`planner.within` in a loop of accelerate, before and after `prepare`, on one rank and sharded."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import planner
from benchmarks.settled_collectives import settle_collectives
from tests.support.measured_loops import MeasuredLoop, Trial
from tests.support.models import gpt2
from tests.support.ranks import on_ranks
from tests.support.stages import record_stages

accelerate = pytest.importorskip("accelerate")

case = partial(gpt2, layers=1, width=32, batch=4, vocab=128)


def model() -> torch.nn.Module:
    return case().model


def train(loop: MeasuredLoop, budget: int | None, *, before: bool, precision: str) -> None:
    """Two steps of two micro-batches, clipped."""
    accelerate.state.AcceleratorState._reset_state()  # its settings are those of the process
    accelerator = accelerate.Accelerator(
        mixed_precision=precision, cpu=True, gradient_accumulation_steps=2)
    batch = case().kwargs
    net = loop.model
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if budget is not None and before:
        planner.within(net, budget, time_limit=1)
    net, optimizer = accelerator.prepare(net, optimizer)
    if budget is not None and not before:
        planner.within(net, budget, time_limit=1)

    def run() -> None:
        for _ in range(4):
            loop.begin_step()
            with accelerator.accumulate(net):
                loss = net(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            loop.note_loss(loss)

    loop.run(run)


@pytest.mark.parametrize("before", [pytest.param(True, marks=pytest.mark.slow), False],
                         ids=["before prepare", "after prepare"])
def test_float32(before):
    trial = Trial.of(model, partial(train, before=before, precision="no"))
    trial.check(steps=4)
    trial.check_equal()


@pytest.mark.slow
def test_bfloat16():
    run = partial(train, before=False, precision="bf16")
    trial = Trial.of(model, run, share=0.75)
    trial.check(steps=4)
    trial.check_near(model, run)


def train_sharded(rank: int, is_planned: bool) -> tuple[list[float], int, torch.nn.Module]:
    """Losses under accelerate's FSDP 2, the most that the rank takes in later steps, the model."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"], cpu_ram_efficient_loading=False)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    # On CPUs accelerate takes DDP whatever its plugin says; its code for FSDP 2 runs there as well.
    accelerate.state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    torch.manual_seed(0)
    net = gpt2(layers=2, batch=1).model.train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net, optimizer = accelerator.prepare(net, optimizer)
    for unit in net.modules():
        if isinstance(unit, FSDPModule):
            settle_collectives(unit)
    assert accelerator.is_fsdp2
    if is_planned:
        planner.within(net, "80%", time_limit=2)
    torch.manual_seed(rank)
    losses = []

    def step() -> None:
        ids = torch.randint(256, (8, 32))
        loss = net(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    peaks = [record.peak_bytes for record in record_stages([step] * 4)]
    resident = sum(parameter.to_local().nbytes for parameter in net.parameters())
    return losses, resident + max(peaks[1:]), net


def sharded(rank: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    plain, plain_bytes, _ = train_sharded(rank, False)
    losses, size_bytes, net = train_sharded(rank, True)
    plan = planner.plan_of(net)
    assert losses == plain and planner.steps_of(net).planned == 4
    assert plan.parallel.kind == "fsdp2" and "transformer.h.0" in plan.parallel.units
    assert size_bytes <= plan.budget_bytes < plain_bytes, (size_bytes, plan.budget_bytes)


@pytest.mark.slow
def test_sharded_by_accelerate():
    on_ranks(sharded)
