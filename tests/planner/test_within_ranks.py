"""`planner.within` on two ranks: DistributedDataParallel and fully_shard, before it and after."""

from __future__ import annotations

import datetime
import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.settled_collectives import settle_collectives
from planner.solvers import Link
from tests.support.models import LanguageModel, causal_model
from tests.support.ranks import on_ranks, train_language_model

VOCAB = 256
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WRAPPERS = ("ddp", "bucket views", "zero1", "fsdp2", "kept", "mixed", "offloaded")


def model() -> nn.Module:
    return causal_model(batch=1, vocab=VOCAB, dropout=0.1).model


def wrap(net: nn.Module, how: str) -> nn.Module:
    if how in ("ddp", "bucket views", "zero1"):
        return DistributedDataParallel(net, gradient_as_bucket_view=how == "bucket views")
    settings: dict[str, Any] = {"mp_policy": MIXED} if how == "mixed" else {}
    if how == "offloaded":  # To the same memory, on a CPU; nothing to pin for.
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if how == "kept":
        settings["reshard_after_forward"] = False
    for block in net.blocks:
        fully_shard(block, **settings)
    fully_shard(net, **settings)
    for unit in (*net.blocks, net):
        settle_collectives(unit)
    return net


def train(net: nn.Module, rank: int, how: str, batches: tuple[int, ...] = (8, 8, 8, 4)
          ) -> tuple[list[float], list[int], torch.Tensor]:
    """Losses, peaks above what was there, and the trained parameters."""
    torch.manual_seed(rank)
    optimizer = (ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3)
                 if how == "zero1" else torch.optim.AdamW(net.parameters(), lr=1e-3))
    losses, peaks = train_language_model(net, optimizer, VOCAB, [(size, 32) for size in batches])
    weights = torch.cat([local(p).detach().flatten() for p in net.parameters()])
    return losses, peaks, weights


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def in_any_order(rank: int, how: str, is_wrapped_first: bool) -> None:
    plain, plain_peaks, plain_weights = train(wrap(model(), how), rank, how)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        net = (planner.within(wrap(model(), how), "80%", time_limit=2) if is_wrapped_first
               else wrap(planner.within(model(), "80%", time_limit=2), how))
        found, peaks, weights = train(net, rank, how)
    plan = planner.plan_of(net)
    assert planner.steps_of(net).planned == 4
    assert len(plan.spec.blocks) == 2 and plan.recompute_flops > 0
    kind = {"bucket views": "ddp", "zero1": "ddp", "kept": "fsdp2", "mixed": "fsdp2",
            "offloaded": "fsdp2"}
    assert plan.parallel.kind == kind.get(how, how) and plan.parallel.ranks == 2
    if how == "mixed":  # torch compiles the blocks, which then round as aot_eager does
        assert (weights - plain_weights).norm() < 2e-2 * plain_weights.norm()
    else:
        assert found == plain
        assert (weights - plain_weights).norm() <= 1e-6 * plain_weights.norm()
    resident = sum(local(p).nbytes for p in net.parameters())
    assert resident + max(peaks[1:3]) <= plan.budget_bytes, (peaks, plan.budget_bytes)
    assert min(peaks[1:3]) < min(plain_peaks[1:3]) and peaks[0] < max(plain_peaks)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["bucket views", "offloaded"])
def test_losses_and_budget_in_any_order(how):
    """Every other kind of wrapper comes before the budget."""
    on_ranks(in_any_order, how, WRAPPERS.index(how) % 2 == 0)


def compiled(rank: int, how: str) -> None:
    """Inductor compiles the blocks."""
    def without_dice() -> nn.Module:
        return wrap(causal_model(batch=1, width=32, vocab=VOCAB).model, how)

    batches = (8, 8, 8)
    plain, plain_peaks, _ = train(without_dice(), rank, how, batches)
    net = planner.within(without_dice(), "80%", backend="inductor")
    found, peaks, _ = train(net, rank, how, batches)
    plan = planner.plan_of(net)
    assert plan.spec.backend == "inductor" and len(plan.spec.blocks) == 2
    assert found == pytest.approx(plain, rel=1e-5)
    resident = sum(local(p).nbytes for p in net.parameters())
    # Clipping takes a few bytes beside.
    assert resident + max(peaks[1:3]) <= 1.005 * plan.peak_bytes <= 1.005 * plan.budget_bytes
    assert max(peaks[1:3]) < 0.85 * max(plain_peaks[1:3])


@pytest.mark.slow
def test_compiled_blocks():
    on_ranks(compiled, "fsdp2", time_out=datetime.timedelta(minutes=10))


def accumulating(rank: int) -> None:
    """Micro-batches without communication, and clipping, as the user writes them."""
    def run(net: DistributedDataParallel) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(rank)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            ids = torch.randint(VOCAB, (4, 32))
            with net.no_sync():
                net(input_ids=ids, labels=ids).loss.backward()
            loss = net(input_ids=ids.flip(0), labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, torch.cat([p.detach().flatten() for p in net.parameters()])

    plain, weights = run(DistributedDataParallel(model(), static_graph=False))
    net = DistributedDataParallel(planner.within(model(), "80%", time_limit=2))
    found, planned_weights = run(net)
    assert found == plain and torch.equal(weights, planned_weights)
    assert planner.steps_of(net).planned == 6


@pytest.mark.slow
def test_micro_steps_without_communication():
    on_ranks(accumulating)


def of_different_sizes(rank: int) -> None:
    """One rank meets a larger batch, and replans alone; the others go on."""
    batches = (4, 4, 8 if rank == 1 else 4, 4)
    plain, _, _ = train(wrap(model(), "fsdp2"), rank, "fsdp2", batches)
    net = planner.within(wrap(model(), "fsdp2"), "80%", time_limit=2)
    found, _, _ = train(net, rank, "fsdp2", batches)
    assert found == plain and planner.steps_of(net).planned == 4


@pytest.mark.slow
def test_a_rank_with_a_larger_batch():
    on_ranks(of_different_sizes)


def of_refused_sizes(rank: int) -> None:
    """One rank meets a larger batch than it may plan for; the others end with it."""
    net = planner.within(wrap(model(), "ddp"), "80%", time_limit=1, on_new="refuse")
    train(net, rank, "ddp", (4, 4))
    if rank == 1:
        with pytest.raises(planner.PlanMismatch, match='on_new="refuse" allows no other'):
            train(net, rank, "ddp", (8,))
    else:  # Nobody reduces gradients with it.
        with pytest.raises(RuntimeError, match=r"(?i)closed|timed out|reset"):
            train(net, rank, "ddp", (4,))
    assert planner.steps_of(net).planned == 2 + (rank == 0)


@pytest.mark.slow
def test_a_rank_that_refuses_a_larger_batch():
    on_ranks(of_refused_sizes, time_out=datetime.timedelta(seconds=60))


def saving(rank: int, folder: str) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    net = planner.within(wrap(model(), "fsdp2"), "80%", time_limit=2)
    train(net, rank, "fsdp2", (4, 4))
    plain = wrap(model(), "fsdp2")
    assert get_model_state_dict(net).keys() == get_model_state_dict(plain).keys()
    checkpoint.save(get_model_state_dict(net), checkpoint_id=folder)
    state = get_model_state_dict(plain)
    checkpoint.load(state, checkpoint_id=folder)
    for found, saved in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(local(found), local(saved))


@pytest.mark.slow
def test_distributed_checkpoints(tmp_path):
    on_ranks(saving, str(tmp_path))


def of_a_saved_plan(rank: int, folder: str) -> None:
    net = model()
    ids = torch.zeros(8, 32, dtype=torch.long)
    plan = planner.plan(net, {"input_ids": ids, "labels": ids}, budget="80%", optimizer="adamw",
                        hold_output=False, time_limit=2, parallel=planner.DataParallel("fsdp2", 2))
    path = os.path.join(folder, f"{rank}.json")
    plan.save(path)
    net = planner.within(wrap(net, "fsdp2"), plan=path)
    train(net, rank, "fsdp2", (8, 8))
    assert planner.plan_of(net) == plan and planner.steps_of(net).planned == 2
    other = planner.plan(model(), {"input_ids": ids, "labels": ids}, budget="80%", time_limit=2,
                         parallel=planner.DataParallel("fsdp2", 8))
    with pytest.raises(planner.PlanMismatch, match="one of 8 ranks under fsdp2, and there are 2"):
        other.apply(model())


@pytest.mark.slow
def test_a_saved_plan_on_ranks(tmp_path):
    on_ranks(of_a_saved_plan, str(tmp_path))
    files = sorted(tmp_path.iterdir())
    assert files[0].read_bytes() == files[1].read_bytes()


def verified(rank: int, how: str) -> None:
    """Before there is a plan in the model, under another one, and applied before it was wrapped."""
    torch.manual_seed(rank)
    ids = torch.randint(VOCAB, (8, 32))
    batch = {"input_ids": ids, "labels": ids}
    settings: dict[str, Any] = {"mixed": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
                                "bucket views": {"gradient_as_bucket_view": True}}.get(how, {})
    kind = "ddp" if how == "bucket views" else "fsdp2"
    plan = planner.plan(model(), batch, budget="75%", optimizer="adamw", hold_output=False,
                        time_limit=1, parallel=planner.DataParallel(kind, 2, **settings))
    assert plan.recompute_flops > 0
    net = wrap(model(), how)
    for before in ("nothing",) if how == "mixed" else ("nothing", "another plan", "applied"):
        if before == "another plan":
            planner.within(net, "95%", time_limit=1)
        elif before == "applied":
            net = wrap(plan.apply(model()), how)
        net(**batch).loss.backward()
        gradients = [local(p.grad).clone() for p in net.parameters()]
        state = torch.get_rng_state()
        found = planner.verify(net, plan, batch)
        assert found.ok, (before, str(found))
        assert found.max_gradient_error == 0 or how == "mixed", found
        assert found.peak_bytes == pytest.approx(plan.peak_bytes, rel=1e-3), found
        assert torch.equal(torch.get_rng_state(), state)
        for gradient, parameter in zip(gradients, net.parameters(), strict=True):
            assert torch.equal(gradient, local(parameter.grad))
    if how == "fsdp2":
        refused(net, plan, batch)


def refused(net: nn.Module, plan: planner.Plan, batch: dict[str, torch.Tensor]) -> None:
    def other(**ranks: Any) -> planner.Plan:
        return planner.plan(model(), batch, time_limit=1, **ranks)

    broken = model()
    for module in broken.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    with pytest.raises(planner.PlanMismatch):
        planner.verify(wrap(broken, "fsdp2"), plan, batch)
    with pytest.raises(ValueError, match="one of 2 ranks, and the plan is for one device"):
        planner.verify(net, other(), batch)
    with pytest.raises(ValueError, match="2 ranks under fsdp2, and this model is on one device"):
        planner.verify(model(), plan, batch)
    for ranks, words in ((planner.DataParallel("ddp", 2), "for ddp, and this model is wrapped by"),
                         (planner.DataParallel("fsdp2", 4), "for one of 4 ranks under fsdp2")):
        with pytest.raises(planner.PlanMismatch, match=words):
            planner.verify(net, other(parallel=ranks), batch)


@pytest.mark.slow
def test_a_plan_of_a_rank_is_verified_in_its_run():
    on_ranks(verified, "mixed")


def storing(rank: int, kind: str) -> None:
    """A substitute is the host of this CPU (`apply.host_store`)."""
    with mock.patch("planner.api.host_link", return_value=Link(1e12)):
        torch.manual_seed(rank)
        ids = torch.randint(VOCAB, (8, 32))
        batch = {"input_ids": ids, "labels": ids}
        parallel = planner.DataParallel(kind, 2)
        plan = planner.plan(model(), batch, budget="80%", optimizer="adamw", hold_output=False,
                            time_limit=1, parallel=parallel, allow="offload")
    assert plan.offloaded_bytes > 0
    traced = planner.data_parallel(model(), batch, parallel=parallel, optimizer="adamw", plan=plan)
    assert traced.peak_bytes == plan.peak_bytes
    found = planner.verify(wrap(model(), kind), plan, batch)
    assert found.ok and found.max_gradient_error == 0, str(found)
    assert found.peak_bytes == pytest.approx(plan.peak_bytes, rel=1e-3), str(found)


@pytest.mark.slow
def test_results_of_a_rank_on_the_host():
    on_ranks(storing, "fsdp2")


def of_two_models(rank: int) -> None:
    """In one group, and one of them is trained less later."""
    torch.manual_seed(0)
    nets = [planner.within(wrap(LanguageModel(depth, 32, VOCAB), "ddp"), time_limit=1)
            for depth in (2, 3)]
    for step in range(4):
        if step == 2:
            nets[0].module.blocks[0].requires_grad_(False)
            nets[0] = wrap(nets[0].module, "ddp")
        for net in nets:
            net(torch.zeros(4, 16, dtype=torch.long)).square().mean().backward()
            net.zero_grad()
    assert all(planner.steps_of(net).planned == 4 for net in nets)


@pytest.mark.slow
def test_two_models_and_a_layer_frozen_later():
    on_ranks(of_two_models)


def of_different_models(rank: int) -> None:
    torch.manual_seed(0)
    net = DistributedDataParallel(LanguageModel(3, 64, VOCAB))
    inner = planner.within(net, "80%", time_limit=2).module
    if rank == 1:
        inner.head = nn.Linear(64, VOCAB + 1)
    with pytest.raises(planner.PlanMismatch, match="trains another model"):
        net(torch.zeros(2, 8, dtype=torch.long)).sum().backward()


@pytest.mark.slow
def test_ranks_with_different_models_all_raise():
    on_ranks(of_different_models)


def one_stops(rank: int) -> None:
    net = wrap(model(), "fsdp2")
    if rank == 0:
        planner.within(net, "80%", time_limit=2)
        with pytest.raises(planner.PlannerError, match="rank 1 has not given its part"):
            train(net, rank, "fsdp2")
    else:  # It gathers what the model's own forward needs, and then waits for the first block.
        with pytest.raises(RuntimeError):
            train(net, rank, "fsdp2")


@pytest.mark.slow
def test_a_rank_that_stops_ends_the_others():
    on_ranks(one_stops, time_out=datetime.timedelta(seconds=10))


def test_one_rank_of_shards():
    """Planned, and the shards of one rank are whole."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        net = model()
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        ids = torch.zeros(8, 32, dtype=torch.long)
        plan = planner.plan(net, {"input_ids": ids, "labels": ids}, budget="90%", time_limit=2)
        assert plan.parallel.kind == "fsdp2" and plan.parallel.units == tuple(
            f"blocks.{number}" for number in range(2))
        with pytest.raises(TypeError, match=r"planner\.within\(model, plan=plan\)"):
            plan.apply(net)
        of_eight = planner.plan(model(), {"input_ids": ids, "labels": ids},
                                parallel=planner.DataParallel("zero1", 8))
        with pytest.raises(planner.PlanMismatch, match="one of 8 ranks under zero1"):
            of_eight.apply(model())
    finally:
        dist.destroy_process_group()
