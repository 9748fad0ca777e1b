"""Plans as policies of torch's selective activation checkpointing."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import planner
from planner._graph_capture.memory.allocator import record_stages
from tests.support.models import LanguageModel, gpt2

IDS = torch.arange(4 * 32).view(4, 32) % 256


def checkpointed(model: nn.Module, policy: planner.SelectiveCheckpointing) -> nn.Module:
    model = copy.deepcopy(model)
    for name in policy.saved:
        block = model.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False,
                                          context_fn=policy.context_fn(name))
    return model


def trained(model: nn.Module) -> tuple[int, list[torch.Tensor]]:
    """Peak of a step, parameters and inputs not counted, and the gradients."""
    torch.manual_seed(7)
    record, = record_stages([lambda: model(input_ids=IDS, labels=IDS).loss.backward()])
    return record.peak_bytes, [parameter.grad for parameter in model.parameters()]


def test_a_plan_of_a_gpt2_becomes_a_policy_for_its_blocks():
    model = gpt2(layers=3, width=64, vocab=256).model.train()
    plan = planner.plan(model, {"input_ids": IDS, "labels": IDS}, budget="60%")
    policy = plan.selective_checkpointing()
    assert policy == plan.selective_checkpointing(["transformer.h.*"])
    assert set(policy.saved) <= {f"transformer.h.{number}" for number in range(3)}
    assert "aten._safe_softmax" in policy.saved["transformer.h.0"]
    assert any("is not promised" in words for words in policy.not_expressed)
    assert policy.recompute_flops > policy.plan_recompute_flops == plan.recompute_flops
    assert all(name in str(policy) for name in policy.saved)

    plain_peak, expected = trained(copy.deepcopy(model))
    peak, gradients = trained(checkpointed(model, policy))
    for mine, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(mine, theirs)
    bare = planner.SelectiveCheckpointing(dict.fromkeys(policy.saved, ()), (), 0, 0)
    least, _ = trained(checkpointed(model, bare))
    assert least < peak < plain_peak  # something is held, and something is not


def test_blocks_that_recompute_nothing_are_left_as_they_are():
    model = LanguageModel(2, 32, 64)
    policy = planner.plan(model, IDS % 64, loss_fn=torch.sum).selective_checkpointing()
    assert (policy.saved, policy.not_expressed, policy.recompute_flops) == ({}, (), 0)
    with pytest.raises(KeyError, match="is not to be checkpointed; these are: none"):
        policy.context_fn("layers.0")


def test_what_is_recomputed_elsewhere_is_named():
    model = LanguageModel(2, 64, 64)
    plan = planner.plan(model, IDS % 64, loss_fn=torch.sum, budget="70%")
    block = next(d.module for d in plan.decisions if d.action == "keep" and ".1" in d.module)
    policy = plan.selective_checkpointing([block])
    assert any("ops outside of the blocks, which the plan recomputes, are kept" in words
               for words in policy.not_expressed)


def test_mistakes_are_told():
    flat = nn.Linear(4, 4)
    plan = planner.plan(flat, torch.ones(2, 4), loss_fn=torch.sum)
    with pytest.raises(ValueError, match="no numbered modules"):
        plan.selective_checkpointing()
    with pytest.raises(ValueError, match=r"blocks=\('encoder',\) names no module"):
        plan.selective_checkpointing(["encoder"])
