"""Planning for Inductor in deep models; the code of all layers, every choice of what is saved, and
the same search on a slow machine are the oracles."""

import itertools
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from planner._graph_capture.torch_compat import kernel_sketch
from planner._graph_capture.training_graph import Phase
from planner.api import capture
from planner.search.candidate import foreseen_step, spec_for_inductor
from planner.search.cheap_to_recompute import saving_seconds
from planner.search.compiled import CUT_OFF
from planner.search.compiled_search import CompiledSearch
from planner.search.effort import Effort
from planner.search.fused_bound import least_cost
from planner.search.planning import plan_within
from planner.search.saving import saved_buffers, schedule_saving
from tests.support.compiler import needs_compiler
from tests.support.inductor import EFFORT, batch, budget_at, loss_of, make_model
from tests.support.models import llama

pytestmark = needs_compiler


def prepare(layers, **options):
    return capture(make_model(layers=layers, **options), batch(), loss_fn=loss_of,
                   backend="inductor")


@pytest.fixture(scope="module")
def deep():
    return prepare(8)


def spec_saving(prepared, saved, kernel_order=False):
    schedule = schedule_saving(prepared.base, saved)
    return replace(spec_for_inductor(prepared, prepared.base, schedule),
                   kernel_order=kernel_order)


@pytest.mark.parametrize(("given_up", "kernel_order"), [
    (2, False), pytest.param(0, False, marks=pytest.mark.slow),
    pytest.param(3, True, marks=pytest.mark.slow)])
def test_layers_left_out_are_accounted_for(deep, given_up, kernel_order):
    """`given_up`: how many of the first layers save nothing but what they are made from."""
    variant, breakdown = deep.base, deep.base.compiled
    saved = breakdown.saved_by_default
    wide = sorted(b for b in saved if variant.graph.buffers[b].size_bytes == 4 * 256 * 128)
    spec = spec_saving(deep, saved.difference(wide[:given_up]), kernel_order)
    estimate = breakdown.estimate(spec)
    assert not breakdown.is_known(spec)  # layers were left out
    whole = breakdown.trace(spec)
    assert estimate.peak_bytes == whole.peak_bytes
    assert estimate.by_category == whole.by_category


def test_kernels_sketched_without_their_loops_take_the_same_memory(monkeypatch):
    def step():
        prepared = prepare(1)
        breakdown = prepared.base.compiled
        return breakdown.trace(spec_saving(prepared, breakdown.saved_by_default))

    sketched = step()
    monkeypatch.setattr(kernel_sketch, "_told", lambda node: False)
    assert step() == sketched


def test_what_is_generated_for_a_try_does_not_grow_with_depth():
    compiled = []
    for layers in (6, 9):
        prepared = prepare(layers, dropout=0.0)  # its seeds are outside of the layers
        breakdown = prepared.base.compiled
        spec = spec_saving(prepared, breakdown.saved_by_default)
        breakdown.estimate(spec)
        assert not breakdown.is_known(spec)
        compiled.append(breakdown.compiled_ops)
    assert compiled[0] == compiled[1]


@pytest.mark.parametrize("fraction", [0.6, 0.8])
def test_no_choice_of_what_is_saved_is_below_the_bound(fraction):
    prepared = prepare(2)
    variant, costs = prepared.base, prepared.base.compiled.saving_costs
    net_bytes = int(fraction * variant.net_peak_bytes(variant.problem.keep_all_schedule))
    everything = sorted(saved_buffers(variant, variant.problem.keep_all_schedule))
    largest = sorted(everything, key=lambda b: -variant.graph.buffers[b].size_bytes)[:11]
    always = set(everything).difference(largest)
    bound = least_cost(variant, net_bytes, costs.to_save, 60.0)
    found = []
    for count in range(len(largest) + 1):
        for chosen in itertools.combinations(largest, count):
            schedule = schedule_saving(variant, always.union(chosen))
            if variant.net_peak_bytes(schedule) <= net_bytes:
                found.append(variant.cost(schedule) + saving_seconds(variant, schedule, costs))
    assert found
    assert bound <= min(found) * (1 + 1e-9)


@pytest.mark.slow
def test_a_slow_machine_finds_the_same_plan(monkeypatch):
    def planned(slower):
        prepared = prepare(4)
        default = plan_within(prepared, None, EFFORT)
        real, begin = time.monotonic, time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: begin + slower * (real() - begin))
            return plan_within(prepared, budget_at(prepared, default, 0.6),
                               Effort(time_limit=1000.0, work_limit=4.0))

    calm, busy = planned(1.0), planned(10.0)
    assert calm.spec == busy.spec
    assert (calm.overhead, calm.overhead_bound) == (busy.overhead, busy.overhead_bound)
    assert 0 <= calm.overhead_bound <= calm.overhead


def test_a_plan_says_that_the_time_limit_cut_the_search_off(deep):
    default = plan_within(deep, None, EFFORT)
    budget = budget_at(deep, default, 0.5)
    hasty = plan_within(deep, budget, Effort(time_limit=1e-3, work_limit=4.0))
    assert hasty.peak_bytes <= budget
    assert CUT_OFF in hasty.notes
    assert sum(hasty.memory.values()) == hasty.peak_bytes
    assert hasty.status == "feasible"


def test_a_search_that_is_late_follows_no_further_try_where_the_whole_step_does_not_fit(
    deep, monkeypatch
):
    default = plan_within(deep, None, EFFORT)
    net = deep.budget.net_bytes(budget_at(deep, default, 0.6))
    search = CompiledSearch(deep, deep.base, EFFORT)
    search.time.deadline = time.monotonic()
    evaluate, confirmed, tries, wholes = search.evaluate, search.confirmed, [], []

    def first_is_too_large(found):
        whole = confirmed(found)
        wholes.append(whole)
        if len(wholes) > 1:
            return whole
        return replace(whole, step=replace(whole.step, peak_bytes=net + net // 50))

    monkeypatch.setattr(search, "evaluate", lambda *args, **kwargs: (
        tries.append(args) or evaluate(*args, **kwargs)))
    monkeypatch.setattr(search, "confirmed", first_is_too_large)
    found = search.within(net)
    assert len(tries) == 1 and len(wholes) == 2 and search.time.is_over
    assert found.step.peak_bytes <= min(net, 0.99 * wholes[0].step.peak_bytes)


@pytest.fixture
def one_try(deep, monkeypatch):
    """A search of a model without layers that are alike, of which each try takes as long as a step,
    with time for one, what that is to take at most, and its tries."""
    default = plan_within(deep, None, EFFORT)
    net = deep.budget.net_bytes(budget_at(deep, default, 0.6))
    search = CompiledSearch(deep, deep.base, EFFORT)
    search.time.deadline = time.monotonic()
    evaluate, tries = search.evaluate, []
    monkeypatch.setattr(search, "evaluate", lambda *args, **kwargs: (
        tries.append(args) or evaluate(*args, **kwargs)))
    monkeypatch.setattr(CompiledSearch, "_has_one_try_left", lambda search: search.is_late())
    return search, net, tries


def test_the_last_try_leaves_what_code_may_need(one_try):
    search, net, tries = one_try
    found = search.within(net)
    assert len(tries) == 1 and search.time.is_over
    assert search.net_peak_bytes(found.schedule) <= 0.95 * net
    assert found.peak_bytes <= net


def test_the_last_try_leaves_what_another_one_needed(one_try):
    search, net, _ = one_try
    least = search.proposals.least[1]
    seen = replace(search.evaluate(least), schedule=least)
    search.followed[:] = [replace(seen, step=replace(
        seen.step, peak_bytes=search.net_peak_bytes(least) + net // 10))]
    found = search.within(net)
    assert search.net_peak_bytes(found.schedule) <= 0.88 * net


def test_where_the_last_try_takes_too_much_the_least_memory_is_next(one_try, monkeypatch):
    search, net, tries = one_try
    evaluate = search.evaluate

    def takes_more(*args, **kwargs):
        found = evaluate(*args, **kwargs)
        return replace(found, step=replace(found.step, peak_bytes=net + 1))

    monkeypatch.setattr(search, "evaluate", takes_more)
    assert search.within(net) is None
    monkeypatch.setattr(search, "evaluate", evaluate)
    found, least = search.smallest(net)
    assert len(tries) == 2 and found.spec.kernel_order
    assert found.step.peak_bytes <= min(net, least)


def test_a_late_search_without_workspace_leaves_the_last_try_to_the_other_account(
    deep, monkeypatch
):
    default = plan_within(deep, None, EFFORT)
    net = deep.budget.net_bytes(budget_at(deep, default, 0.6))
    search = CompiledSearch(deep, deep.base, EFFORT, started=time.monotonic() - 1000)
    lean = search.without_workspace()
    assert lean.time.deadline == search.time.deadline
    monkeypatch.setattr(lean, "evaluate", lambda *args, **kwargs: pytest.fail("a try"))
    assert lean.within(net) is None and lean.time.is_over


def test_what_there_is_no_time_to_generate_is_the_account_of_ops_and_what_was_seen_beside(deep):
    schedule = CompiledSearch(deep, deep.base, EFFORT).proposals.default
    step = foreseen_step(deep.base, schedule, 1000)
    assert step.peak_bytes == deep.base.net_peak_bytes(schedule) + 1000
    assert sum(step.by_category.values()) == step.peak_bytes


def test_near_the_default_code_is_taken_to_need_what_that_of_the_default_does(deep):
    search = CompiledSearch(deep, deep.base, EFFORT)
    default = search.proposals.default
    by_breakdown = search.net_peak_bytes(default)
    near, far = int(0.9 * by_breakdown), int(0.5 * by_breakdown)
    assert search._expected_codegen_overhead(near)[0] > 0
    code_bytes = search.default().peak_bytes
    assert search._expected_codegen_overhead(near)[0] == code_bytes - by_breakdown + int(
        0.004 * near
    )
    # Inductor decides on layouts, and these on the workspace that is accounted for here.
    assert search.depends_on_workspace(far)
    assert search._expected_codegen_overhead(far)[0] == max(
        code_bytes - by_breakdown, int(0.015 * far)
    )
    lean = search.without_workspace()
    assert lean._expected_codegen_overhead(far)[0] == max(
        code_bytes - lean.net_peak_bytes(default), int(0.004 * far))


def proposals_of(prepared, effort=EFFORT):
    return CompiledSearch(prepared, prepared.base, effort).proposals


def test_what_was_found_for_less_starts_a_later_proposal(deep, monkeypatch):
    proposals, asked = proposals_of(deep), []
    ask = proposals._ask

    def noted(variant, net_bytes, least_seconds=0.0, start=None):
        asked.append((net_bytes, start))
        return ask(variant, net_bytes, least_seconds, start)

    monkeypatch.setattr(proposals, "_ask", noted)
    first = int(0.6 * deep.base.net_peak_bytes(proposals.default))
    proposals.within(first)
    (less, nothing), (same, start) = asked
    assert less < first == same and nothing is None
    assert deep.base.net_peak_bytes(start) <= less
    later = (less + first) // 2
    proposals.within(later)
    assert [each[0] for each in asked[2:]] == [later]
    assert deep.base.net_peak_bytes(asked[2][1]) <= later


def test_what_more_memory_may_gain_is_no_less_than_what_it_does(deep):
    proposals = proposals_of(deep)
    first = int(0.6 * deep.base.net_peak_bytes(proposals.default))
    assert proposals.gain_within(first) == float("inf")  # nothing is known yet
    before = proposals._priced.cost(proposals._solve(first))
    for more in (1.005, 1.02, 1.05):
        gain = proposals.gain_within(int(more * first))
        again = proposals_of(deep)  # which does not go on from the first
        gained = before - again._priced.cost(again._solve(int(more * first)))
        assert 0.0 <= gain < float("inf")
        assert gained <= gain + 1e-3 * deep.base.problem.keep_all_cost


def of_layers(graph):
    """Results of the forward of the layers, by module, op and how often that came before in it."""
    times, found = Counter(), {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and ".layers." in op.module:
            for slot, buffer in enumerate(op.outputs):
                found[op.module, op.target, times[op.module, op.target], slot] = buffer
            times[op.module, op.target] += 1
    return found


@pytest.mark.slow
def test_no_decision_of_plans_by_blocks_is_better_in_the_whole_model():
    effort = Effort(time_limit=1000.0, work_limit=4.0)  # a search that is cut off may miss them
    mask = torch.ones(128, 128, dtype=torch.bool).tril().expand(2, 1, -1, -1).contiguous()
    case = llama(layers=4, seq=128, vocab=128)
    # Without a mask, blocks and the whole model are not the same ops.
    inputs = {**case.inputs, "attention_mask": mask}
    prepared, blocks = (capture(case.model, inputs, regions=regions, backend="inductor")
                        for regions in ("model", "blocks"))
    variant, breakdown = prepared.base, prepared.base.compiled
    names = {buffer: name for name, buffer in of_layers(blocks.base.graph).items()}
    there, proposals = of_layers(variant.graph), proposals_of(prepared, effort)
    outside = breakdown.saved_by_default.difference(there.values())
    default = plan_within(prepared, None, effort)
    budget = budget_at(prepared, default, 0.8)
    plan = plan_within(prepared, budget, effort)
    assert plan.peak_bytes <= budget
    by_blocks = CompiledSearch(blocks, blocks.base, effort).within(blocks.budget.net_bytes(budget))
    assert by_blocks is not None
    saved = saved_buffers(blocks.base, by_blocks.schedule)
    mapped = {there[names[buffer]] for buffer in saved if names.get(buffer) in there}
    assert mapped
    for choice in (mapped, mapped | outside):
        schedule = schedule_saving(variant, choice)
        extra = (proposals.cost(schedule) - proposals.cost(proposals.default)
                 ) / variant.problem.keep_all_cost
        if extra < plan.overhead:  # then it takes more than there is, in either order
            for strict in (False, True):
                step = breakdown.trace(spec_saving(prepared, choice, strict))
                assert prepared.budget.whole_bytes(step.peak_bytes) > budget
