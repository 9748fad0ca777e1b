"""The model around sharded blocks (`fully_shard`) on two ranks: embedding, head and loss are
planned, and each step uses the memory that its plan says."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import planner
from benchmarks.settled_collectives import settle_collectives
from tests.support.ranks import on_ranks, train_language_model

VOCAB, BATCH, LENGTH, STEPS = 1024, 4, 32, 3


def model(*, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=LENGTH,
        tie_word_embeddings=tied, use_cache=False)).train()


def shard(net: nn.Module, how: str) -> nn.Module:
    """`tail`: as torchtitan and accelerate do; the tail stays gathered."""
    units = [*net.model.layers]
    if how == "tail":
        units += [net.model.embed_tokens, [net.model.norm, net.lm_head]]
    for unit in units:
        fully_shard(unit, reshard_after_forward=not isinstance(unit, list))
    fully_shard(net)
    for module in (*net.model.layers, *((net.model.embed_tokens, net.lm_head)
                                        if how == "tail" else ()), net):
        settle_collectives(module)
    return net


def train(net: nn.Module, rank: int) -> tuple[list[float], list[int]]:
    """Losses, and the peak of each step with parameters and buffers."""
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    there = (sum(p.to_local().nbytes for p in net.parameters())
             + sum({b.data_ptr(): b.nbytes for b in net.buffers()}.values()))
    losses, peaks = train_language_model(net, optimizer, VOCAB, [(BATCH, LENGTH)] * STEPS)
    return losses, [there + peak for peak in peaks]


def trained(rank: int, tied: bool, how: str, settings: dict[str, Any]) -> None:
    plain, plain_peaks = train(shard(model(tied=tied), how), rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        net = planner.within(shard(model(tied=tied), how), time_limit=1, **settings)
        losses, peaks = train(net, rank)
    plan = planner.plan_of(net)
    if how == "tail":
        assert plan.parallel.units[-1] == ("model.norm", "lm_head")
        assert plan.parallel.kept_units == ("model.norm",)
    assert "" in {region.block for region in plan.spec.regions}
    assert planner.steps_of(net).planned == STEPS and plan.recompute_flops > 0
    assert losses == (plain if "allow" not in settings else pytest.approx(plain, rel=1e-6))
    assert max(peaks[1:]) <= plan.budget_bytes, (peaks, plan.budget_bytes)
    assert peaks[1:] == pytest.approx([plan.peak_bytes] * (STEPS - 1), rel=1e-3)
    assert plain_peaks[1:] == pytest.approx([plan.baseline_peak_bytes] * (STEPS - 1), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "how", "settings"), [
    (False, "tail", {"budget": "80%"}),
    (True, "blocks", {"budget": "60%", "allow": "chunk"}),
])
def test_a_step_uses_what_its_plan_says(tied, how, settings):
    on_ranks(trained, tied, how, settings)
