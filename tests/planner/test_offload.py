"""`allow="offload"`: results stored on the host, for a GPU that is not here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner._apply.rewrite_spec import Fetch, Release, Store
from planner.api import capture
from planner.plans.file import dumps, loads
from tests.support.offloading import with_link
from tests.support.training import captured, subject

ALLOW = ("recompute", "offload")


def deep(layers: int = 6) -> tuple[nn.Module, torch.Tensor]:
    """Wide layers on many rows: copies are cheap beside what it takes to make their results."""
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(layers)
                                for layer in (nn.Linear(4096, 4096), nn.GELU())))
        return model, torch.empty(8192, 4096)


def make(budget: str | int, allow: tuple[str, ...], **arguments: object) -> planner.Plan:
    model, inputs = deep()
    return planner.plan(model, inputs, budget=budget, device="cuda", loss_fn=torch.sum, allow=allow,
                        time_limit=5, probe=False, **{"gpu": "A100", **arguments})


def test_a_plan_for_a_gpu_stores_on_the_host_what_is_dear_to_compute():
    alone, plan = make("60%", ("recompute",)), make("60%", ALLOW)
    assert alone.overhead > plan.overhead >= plan.overhead_bound
    assert plan.peak_bytes <= plan.budget_bytes
    kinds = [type(action) for group in plan.spec.regions[0].insertions
             for action in group.actions]
    assert kinds.count(Store) == kinds.count(Release) == kinds.count(Fetch) > 0
    assert plan.offloaded_bytes > 0 == alone.offloaded_bytes
    # The standard's 32 GB/s, and what of a rate is reached.
    assert plan.transfer_seconds == pytest.approx(2 * plan.offloaded_bytes / 25.6e9, rel=0.01)
    assert any("experimental" in note for note in plan.notes)
    assert "on the host" in str(plan) and "on the host" not in str(alone)
    assert loads(dumps(plan)) == plan


@pytest.mark.slow
def test_the_faster_the_link_the_less_is_lost():
    slow = planner.Gpu("slow", (8, 0), 80 << 30, 19.5, 312, 1935, host_link_gb=1)
    fast = planner.Gpu("fast", (8, 0), 80 << 30, 19.5, 312, 1935, host_link_gb=1000)
    lost = [make("60%", ALLOW, gpu=gpu).overhead for gpu in (slow, "A100", fast)]
    assert lost == sorted(lost, reverse=True) and lost[-1] < lost[0]
    with pytest.raises(ValueError, match="host_link_gb must be above 0"):
        planner.Gpu("none", (8, 0), 1, 1, 1, 1, host_link_gb=0)


@pytest.mark.slow
def test_a_refusal_names_what_would_do_if_it_were_allowed():
    with pytest.raises(planner.InfeasibleBudget) as refused:
        make(1, ("recompute",))
    least = refused.value.alternatives[ALLOW]
    assert least < refused.value.minimum_bytes
    assert make(least, ALLOW).peak_bytes <= least
    with pytest.raises(planner.InfeasibleBudget) as refused:
        make(1, ALLOW)
    assert make(refused.value.minimum_bytes, ALLOW).peak_bytes <= refused.value.minimum_bytes


@pytest.mark.parametrize(("arguments", "message"), [
    ({"cost_model": "flops"}, "copies have no cost"),
    ({"budget_of": "reserved", "device": "cuda"}, 'cannot be had with budget_of="reserved"'),
    ({}, "on the device `cpu`: its results are in the memory of the host already"),
])
def test_where_it_cannot_be_had_words_say_so(arguments, message):
    with pytest.raises(ValueError, match=message):
        planner.plan(nn.Linear(2, 2), torch.randn(3, 2), allow=ALLOW, **arguments)


def test_what_makes_plans_of_its_own_refuses_it():
    model, inputs = nn.Linear(2, 2), torch.randn(3, 2)
    for call in (lambda: planner.within(model, "1GB", allow=ALLOW),
                 lambda: planner.frontier(model, inputs, allow=ALLOW)):
        with pytest.raises(ValueError, match=r"is for planner\.plan so far"):
            call()


@pytest.mark.slow
def test_what_the_user_keeps_and_what_the_caller_holds_stays():
    case = subject("dropout_everywhere").case
    kept = capture(case.model, case.inputs, loss_fn=case.loss_fn, keep=("blocks.*",))
    for step, inside in ((with_link(captured(case), 1e9), True), (with_link(kept, 1e9), False)):
        variant = step.base
        movable = [index for index, s in enumerate(variant.problem.storages) if s.offloadable]
        makers = [variant.graph.ops[variant.graph.buffers[index].producer] for index in movable]
        assert movable and inside == any(op.module.startswith("blocks.") for op in makers)
        outputs = {output.buffer for output in variant.graph.outputs}
        assert outputs.isdisjoint(movable)
