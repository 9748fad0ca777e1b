"""Results that are away from the device: the same numbers, and memory to the byte.

A stand-in takes the part of the host (`apply.host_store`): its memory is not that of torch's
allocator, so that the allocator shows what a device would hold.
"""

from __future__ import annotations

import pytest
import torch

from planner._apply import host_store
from planner._apply.host_store import SharedHost
from planner.plans.decisions import schedule_of
from planner.search.planning import plan_within
from planner.solvers import Fetch, Store
from planner.solvers.simulator import simulate
from tests.support.offloading import random_transfers, with_link
from tests.support.training import (
    EFFORT,
    apply_schedule,
    captured,
    measured_peak,
    random_schedule,
    subject,
    train,
)

CASES = [("dropout_everywhere", 1), ("resnet", 1),
         *(pytest.param(name, seed, marks=pytest.mark.slow) for name, seed in (
             ("gpt2", 1), ("gpt2", 2), ("resnet", 2), ("views", 1), ("llama", 1),
             ("many_outputs", 1)))]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_any_transfers_beside_any_recomputations(name, seed):
    owner = subject(name)
    step = with_link(owner.step, 1e9)
    problem = step.base.problem
    schedule = random_transfers(problem, random_schedule(problem, seed, 0.3), seed)
    assert any(isinstance(action, Fetch) for action in schedule)
    model, timeline = apply_schedule(owner.case, step, schedule)
    assert train(model, owner.case).differences(owner.reference) == []
    assert measured_peak(model, owner.case) == timeline.peak_bytes


@pytest.mark.parametrize(("name", "blocks"), [("dropout_everywhere", "blocks.*"), pytest.param(
    "gpt2", "transformer.h.*", marks=pytest.mark.slow)])
def test_any_transfers_by_blocks(name, blocks):
    """Results of one block are away while another runs."""
    owner = subject(name)
    step = with_link(captured(owner.case, regions=(blocks,)), 1e9)
    problem = step.base.problem
    schedule = random_transfers(problem, random_schedule(problem, 1, 0.3), 1)
    assert any(isinstance(action, Fetch) for action in schedule)
    model, timeline = apply_schedule(owner.case, step, schedule)
    assert train(model, owner.case).differences(owner.reference) == []
    assert measured_peak(model, owner.case) == timeline.peak_bytes


@pytest.mark.parametrize("name", ["resnet", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_plan_that_stores_on_the_host_takes_less_than_recomputation_can(name):
    owner = subject(name)
    step = with_link(owner.step, 1e9)
    variant = step.base
    budget = (step.keep_all_peak_bytes + owner.smallest.peak_bytes) // 2
    plan = plan_within(step, budget, EFFORT)
    alone = plan_within(owner.step, budget, EFFORT)
    assert plan.overhead <= alone.overhead
    schedule = schedule_of(step.variant_of(plan.spec), plan.spec)
    assert any(isinstance(action, Store) for action in schedule)
    assert any(row.action == "offload" for row in plan.decisions)
    assert variant.budget.whole_bytes(simulate(
        step.variant_of(plan.spec).problem, schedule).peak_bytes) == plan.peak_bytes
    model = plan.apply(owner.case.model)
    assert train(model, owner.case).differences(owner.reference) == []
    assert measured_peak(model, owner.case) + plan.resident_bytes == plan.peak_bytes <= budget


class Late:
    """A host to and from which bytes are copied as late as it is allowed: when the end of the copy
    is waited for.  What was written over too early, or read too early, then shows."""

    def __init__(self, target, source):
        self.target, self.source = target, source

    def wait(self):
        self.target.copy_(self.source)


class LateHost(SharedHost):
    def copy(self, target, source):
        return Late(target, source)


@pytest.mark.parametrize("name", ["resnet", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_copies_may_end_at_any_time_before_they_are_waited_for(name, monkeypatch):
    monkeypatch.setitem(host_store._stores, torch.device("cpu"), LateHost())
    owner = subject(name)
    step = with_link(owner.step, 1e9)
    for seed in (1, 2):
        schedule = random_transfers(
            step.base.problem, random_schedule(step.base.problem, seed, 0.3), seed, 0.8)
        model, timeline = apply_schedule(owner.case, step, schedule)
        assert train(model, owner.case).differences(owner.reference) == []
        assert measured_peak(model, owner.case) == timeline.peak_bytes


def test_a_tensor_comes_back_as_it_was_whatever_its_layout():
    whole = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    for tensor in (whole, whole.t(), whole[1:, ::2], whole.bool(), whole.to(torch.bfloat16),
                   torch.complex(whole, whole)):
        host = host_store.finish(host_store.begin_store(tensor))
        back = host_store.finish(host_store.begin_fetch(host, tensor.device))
        assert torch.equal(back, tensor) and back.stride() == tensor.stride()
        assert back.data_ptr() != tensor.data_ptr() and back.dtype == tensor.dtype


def test_a_copy_that_nobody_ends_is_waited_for_when_it_is_let_go():
    ended = []

    class Ending:
        def wait(self):
            ended.append(True)

    copy = host_store.Copy(Ending(), torch.zeros(1), torch.zeros(1))
    del copy
    assert ended == [True]
