"""`planner.within` on two ranks of DistributedDataParallel, and where ranks hold shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import planner
from graph_capture.memory.allocator import record_stages
from tests.support.models import LanguageModel

VOCAB = 256


def model() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(3, 64, VOCAB)


def train(net: nn.Module, rank: int) -> tuple[list[float], list[int]]:
    """Three steps: losses, and peaks above the parameters and the buckets."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + rank)
        ids = torch.randint(VOCAB, (8, 32), generator=generator)
        logits = net(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    records = record_stages([lambda number=number: step(number) for number in range(3)])
    return losses, [record.peak_bytes for record in records]


def one_rank(rank: int, folder: str, order: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2,
                            store=dist.FileStore(f"{folder}/store", 2))
    try:
        plain, plain_peaks = train(DistributedDataParallel(model()), rank)
        net = model()
        if order == "within first":
            net = DistributedDataParallel(planner.within(net, "80%", time_limit=2))
        else:
            net = planner.within(DistributedDataParallel(net), "80%", time_limit=2)
        found, peaks = train(net, rank)
        plan = planner.plan_of(net)
        resident = sum(p.numel() * p.element_size() for p in net.parameters())
        assert found == plain
        assert planner.steps_of(net).planned == 3
        assert len(plan.recipe.blocks) == 3 and plan.recompute_flops > 0
        # The gradients' buckets, made anew after the first step, are measured too.
        assert resident + max(peaks) <= plan.budget_bytes < resident + max(plain_peaks)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["within first", "wrapped first"])
def test_two_ranks_of_data_parallel(order, tmp_path):
    spawn(one_rank, (str(tmp_path), order), nprocs=2)


def test_shards_are_refused_with_the_way_out():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        net = model()
        for block in net.blocks:
            fully_shard(block)
        with pytest.raises(planner.CaptureError, match=r"blocks\.0 is sharded by fully_shard"):
            planner.plan(net, torch.zeros(2, 8, dtype=torch.long))
    finally:
        dist.destroy_process_group()
