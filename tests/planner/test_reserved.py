"""What torch reserves of a GPU: predicted for plans and loops, and budgets of it, held."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.memory.caching_allocator import CachingAllocator, replay
from planner._graph_capture.memory.trace import Block, MemoryTrace, OpRun
from planner._graph_capture.training_graph import Category
from planner.api import capture
from planner.plans.file import dumps, loads
from planner.step.loop_trace import LoopTrace, Span, StepPhase
from planner.step.reserved import reserved_by
from tests.support.command_line import TINY_GPT2, run

MIB = 2 ** 20
BATCH = 16384
ON_GPU = {"device": "cuda", "optimizer": "adamw", "time_limit": 2.0}


def network(layers=4):
    """Layers of different widths, so that blocks of one do not fit those of the next."""
    widths = [256 + 96 * (number % 3) for number in range(layers + 1)]
    with torch.device("meta"):
        return nn.Sequential(*(part for here, there in pairwise(widths)
                               for part in (nn.Linear(here, there), nn.GELU())))


def inputs(batch=BATCH):
    return (torch.zeros(batch, 256, device="meta"),)


def mean(output):
    return output.square().mean()


def plan(budget=None, **arguments):
    return planner.plan(network(), inputs(), budget=budget, loss_fn=mean, **ON_GPU | arguments)


@pytest.fixture(scope="module")
def unlimited():
    return plan()


def loop_of(sizes, first, second):
    """A loop that does nothing but make blocks and release them, in the forwards of two steps."""
    blocks = tuple(Block(size, Category.ACTIVATIONS) for size in sizes)
    spans = (Span(StepPhase.LOADING, 0, 0, 0),
             Span(StepPhase.FORWARD, 1, 0, len(first)),
             Span(StepPhase.FORWARD, 2, len(first), len(first) + len(second)))
    runs = (OpRun(1, "aten.mm", ""),)
    return LoopTrace(MemoryTrace(blocks, (*first, *second), runs), spans)


def test_a_loop_is_replayed_until_nothing_more_is_reserved():
    # The first block of 12 MiB lies where one of 30 MiB was.
    sizes = [30 * MIB, 12 * MIB, 30 * MIB, 12 * MIB]
    loop = loop_of(sizes, [0, ~0, 1], [~1, 2, 3, ~2, ~3])
    assert reserved_by(loop) == 42 * MIB
    # The workspace comes while 30 MiB are in use; 12 of its segment of 20 MiB are left.
    assert reserved_by(loop, 8 * MIB) == 50 * MIB
    assert reserved_by(loop, expandable=True) == 60 * MIB


def test_a_later_step_may_reserve_more_than_the_first():
    # First 12 MiB, then 13 and 12 at once: the first finds 12 too small.
    loop = loop_of([12 * MIB, 13 * MIB, 12 * MIB], [0, ~0], [1, 2, ~2, ~1])
    assert reserved_by(loop) == 26 * MIB  # a rest of 1 MiB is not split off


def test_a_plan_says_what_is_reserved(unlimited, tmp_path):
    assert unlimited.peak_bytes < unlimited.reserved_bytes < 2 * unlimited.peak_bytes
    assert unlimited.baseline_peak_bytes < unlimited.baseline_reserved_bytes
    assert unlimited.reserved_bytes % (2 * MIB) == 0
    assert f"{unlimited.reserved_bytes:,}" in str(unlimited)
    unlimited.save(tmp_path / "plan.json")
    assert planner.load(tmp_path / "plan.json") == unlimited


def test_expandable_segments_of_the_environment_count(unlimited, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8, "
                       "expandable_segments:True")
    found = plan()
    assert found.peak_bytes <= found.reserved_bytes < unlimited.reserved_bytes
    assert any("expandable" in note for note in found.notes)


def test_the_loop_of_a_plan_reserves_what_the_plan_says(unlimited):
    tight = plan(budget="70%")
    for made in (unlimited, tight):
        report = planner.memory(network(), inputs(), loss_fn=mean, plan=made, optimizer="adamw",
                                device="cuda")
        assert report.reserved_bytes == made.reserved_bytes
    report = planner.memory(network(), inputs(), loss_fn=mean, optimizer="adamw", device="cuda")
    assert report.reserved_bytes == unlimited.baseline_reserved_bytes > report.peak_bytes
    assert f"{report.reserved_bytes:,}" in str(report)
    assert report.to_dict()["reserved_bytes"] == report.reserved_bytes


def test_the_blocks_of_a_plan_are_those_of_its_account(unlimited):
    """What is replayed peaks where the plan does."""
    step = capture(network(), inputs(), loss_fn=mean, optimizer="adamw", device="cuda")
    report = planner.memory(network(), inputs(), loss_fn=mean, plan=unlimited, optimizer="adamw",
                            device="cuda")
    trace = report.trace.trace
    allocator, held, peak = CachingAllocator(expandable=True), {}, 0
    sizes = [block.size_bytes for block in trace.blocks]
    for event in trace.events:
        replay(sizes, [event], allocator, held)
        peak = max(peak, allocator.allocated_bytes)
    assert step.surroundings.workspace_bytes == 8_519_680
    assert unlimited.peak_bytes <= peak < 1.01 * unlimited.peak_bytes


@pytest.mark.parametrize("share", [
    0.8, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.95, 0.7))])
def test_a_budget_of_what_is_reserved_is_held(unlimited, share):
    budget = int(share * unlimited.baseline_reserved_bytes)
    try:
        found = plan(budget=budget, budget_of="reserved")
    except planner.InfeasibleBudget as refusal:
        assert refusal.minimum_bytes > budget
        found = plan(budget=refusal.minimum_bytes, budget_of="reserved")
    assert found.reserved_bytes <= found.budget_bytes and found.budget_of == "reserved"
    assert found.peak_bytes <= found.reserved_bytes
    same_limit = plan(budget=found.budget_bytes)  # of what is allocated, which is less
    assert same_limit.overhead <= found.overhead + 1e-9
    assert found.overhead_bound <= same_limit.overhead + 1e-9
    assert loads(dumps(found)) == found


def test_a_percentage_is_of_what_the_plain_step_reserves(unlimited):
    found = plan(budget="90%", budget_of="reserved")
    assert found.budget_bytes == int(0.9 * unlimited.baseline_reserved_bytes)
    assert "of what is reserved" in str(found)


def test_where_nothing_fits_the_smallest_budget_works():
    with pytest.raises(planner.InfeasibleBudget, match="reserves then") as caught:
        plan(budget="20MB", budget_of="reserved")
    smallest = plan(budget=caught.value.minimum_bytes, budget_of="reserved")
    assert smallest.reserved_bytes <= caught.value.minimum_bytes
    with pytest.raises(planner.InfeasibleBudget):
        plan(budget=caught.value.minimum_bytes // 2, budget_of="reserved")


def test_where_nothing_is_reserved_that_is_said():
    with pytest.raises(ValueError, match="reserves nothing beyond"):
        plan(budget="1GB", budget_of="reserved", device="cpu")
    with pytest.raises(ValueError, match="Inductor compiles"):
        plan(budget="1GB", budget_of="reserved", backend="inductor")
    with pytest.raises(ValueError, match="unknown budget_of 'all'; known: allocated, reserved"):
        plan(budget="1GB", budget_of="all")
    model = planner.within(nn.Linear(3, 3), "1GB", budget_of="reserved")
    with pytest.raises(ValueError, match="reserves nothing beyond"):
        model(torch.zeros(2, 3)).sum()
    assert plan(device="cpu").reserved_bytes is None


def test_gradients_of_earlier_micro_steps_count(unlimited):
    found = plan(accumulation=4)
    assert found.reserved_bytes > unlimited.resident_bytes
    assert found.peak_bytes <= found.reserved_bytes
    shards = planner.DataParallel("fsdp2", 2)
    assert plan(parallel=shards).reserved_bytes is not None
    assert plan(parallel=shards, accumulation=2).reserved_bytes is None
    with pytest.raises(ValueError, match="shards add up"):
        plan(parallel=shards, accumulation=2, budget="1GB", budget_of="reserved")


def test_the_curve_is_one_of_what_is_reserved():
    curve = planner.frontier(network(), inputs(), points=5, loss_fn=mean, budget_of="reserved",
                             **ON_GPU)
    reserved = [each.reserved_bytes for each in curve]
    assert reserved == sorted(reserved, reverse=True) == [each.budget_bytes for each in curve]
    assert all(each.overhead_bound <= each.overhead for each in curve)


@pytest.mark.slow
def test_sizes_fit_what_is_reserved(unlimited):
    budget = unlimited.baseline_reserved_bytes
    arguments = {"budget": budget, "loss_fn": mean, "budget_of": "reserved", **ON_GPU}
    found = planner.max_batch_size(network(), inputs, multiple_of=1024, largest=2 * BATCH,
                                   **arguments)
    assert found.plain == BATCH and found.planned > BATCH
    assert found.plan.reserved_bytes <= budget


@pytest.mark.slow
def test_advice_counts_what_is_reserved(unlimited):
    budget = unlimited.baseline_reserved_bytes
    advice = planner.advise(network(), inputs, effective_batch=2 * BATCH, budget=budget,
                            loss_fn=mean, budget_of="reserved", **ON_GPU)
    plans = [each.plan for each in advice.choices if each.plan is not None]
    assert plans and all(each.reserved_bytes <= budget for each in plans)


@pytest.mark.slow
def test_the_command_line_takes_a_budget_of_what_is_reserved():
    arguments = [*TINY_GPT2, "--device", "cuda", "--budget-of", "reserved"]
    document = json.loads(run("plan", *arguments, "--budget", "100%", "--json").stdout)
    predicted = document["predicted"]
    assert predicted["reserved_bytes"] <= document["budget_bytes"]
    reserved = predicted["baseline_reserved_bytes"]
    loop = json.loads(run("memory", *TINY_GPT2, "--device", "cuda", "--json").stdout)
    assert loop["reserved_bytes"] == reserved
