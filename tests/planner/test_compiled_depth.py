"""Planning for Inductor in deep models; the code of all layers, every choice of what is saved, and
the same search on a slow machine are the oracles."""

import itertools
import time
from collections import Counter
from dataclasses import replace

import pytest

from planner._apply.inductor import InductorBackend
from planner._graph_capture.torch_compat import inductor
from planner._graph_capture.training_graph import Phase
from planner.api import capture
from planner.search.compiled import CUT_OFF
from planner.search.compiled_search import (
    CompiledSearch,
    least_cost,
    saved_buffers,
    saving_seconds,
    schedule_saving,
    spec_for_inductor,
)
from planner.search.planning import plan_within
from planner.search.variants import Effort
from tests.support.compiler import needs_compiler
from tests.support.inductor import EFFORT, batch, budget_at, loss_of, make_model
from tests.support.models import causal_model

pytestmark = needs_compiler

UNHURRIED = Effort(time_limit=1000.0, work_limit=4.0)  # a search that is cut off tries less


def prepare(layers, **options):
    return capture(make_model(layers=layers, **options), batch(), loss_fn=loss_of,
                   backend="inductor")


@pytest.fixture(scope="module")
def deep():
    return prepare(8)


@pytest.fixture(scope="module")
def default(deep):
    return plan_within(deep, None, EFFORT)


def spec_saving(prepared, saved, kernel_order=False):
    schedule = schedule_saving(prepared.base, saved)
    return replace(spec_for_inductor(prepared, prepared.base, schedule),
                   kernel_order=kernel_order)


@pytest.mark.slow
@pytest.mark.parametrize(("given_up", "kernel_order"), [(2, False), (0, False), (3, True)])
def test_layers_left_out_are_accounted_for(deep, given_up, kernel_order):
    """`given_up`: how many of the first layers save nothing but what they are made from."""
    variant, breakdown = deep.base, deep.base.compiled
    saved = breakdown.saved_by_default
    wide = sorted(b for b in saved if variant.graph.buffers[b].size_bytes == 4 * 256 * 128)
    spec = spec_saving(deep, saved.difference(wide[:given_up]), kernel_order)
    estimate = breakdown.estimate(spec)
    assert spec not in breakdown._known  # layers were left out
    whole = breakdown.trace(spec)
    assert estimate.peak_bytes == whole.peak_bytes
    assert estimate.by_category == whole.by_category


@pytest.mark.slow
def test_kernels_sketched_without_their_loops_take_the_same_memory(monkeypatch):
    def step():
        prepared = prepare(1)
        breakdown = prepared.base.compiled
        return breakdown.trace(spec_saving(prepared, breakdown.saved_by_default))

    sketched = step()
    monkeypatch.setattr(inductor, "_told", lambda node: False)
    assert step() == sketched


@pytest.mark.slow
def test_what_is_generated_for_a_try_does_not_grow_with_depth(monkeypatch):
    compiled, prepared_graphs = [], InductorBackend._prepared

    def counted(*args):
        graphs = prepared_graphs(*args)
        compiled.append(sum(node.op == "call_function"
                            for module in (graphs.forward, graphs.backward)
                            for node in module.graph.nodes))
        return graphs

    for layers in (6, 9):
        prepared = prepare(layers, dropout=0.0)  # its seeds are outside of the layers
        breakdown = prepared.base.compiled
        spec = spec_saving(prepared, breakdown.saved_by_default)
        with monkeypatch.context() as patch:
            patch.setattr(InductorBackend, "_prepared", counted)
            breakdown.estimate(spec)
        assert spec not in breakdown._known
    first, second = compiled
    assert first == second


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
        prepared = prepare(3)
        default = plan_within(prepared, None, EFFORT)
        real, begin = time.monotonic, time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: begin + slower * (real() - begin))
            return plan_within(prepared, budget_at(prepared, default, 0.6),
                               UNHURRIED)

    calm, busy = planned(1.0), planned(10.0)
    assert calm.spec == busy.spec
    assert (calm.overhead, calm.overhead_bound) == (busy.overhead, busy.overhead_bound)
    assert 0 <= calm.overhead_bound <= calm.overhead


@pytest.mark.slow
def test_a_plan_says_that_the_time_limit_cut_the_search_off(deep, default):
    budget = budget_at(deep, default, 0.4)
    hasty = plan_within(deep, budget, Effort(time_limit=1e-3, work_limit=4.0))
    assert hasty.peak_bytes <= budget
    assert CUT_OFF in hasty.notes
    assert sum(hasty.memory.values()) == hasty.peak_bytes
    assert hasty.status == "feasible"


@pytest.mark.slow
def test_where_the_whole_step_does_not_fit_the_solver_gets_less(deep, default, monkeypatch):
    net = deep.budget.net_bytes(budget_at(deep, default, 0.6))
    search = CompiledSearch(deep, deep.base, UNHURRIED)
    confirmed, wholes = search.confirmed, []

    def first_is_too_large(found):
        wholes.append(confirmed(found))
        if len(wholes) > 1:
            return wholes[-1]
        return replace(wholes[0], step=replace(wholes[0].step, peak_bytes=net + net // 50))

    monkeypatch.setattr(search, "confirmed", first_is_too_large)
    found = search.within(net)
    assert len(wholes) == 2
    assert found.peak_bytes <= min(net, 0.99 * wholes[0].peak_bytes)


@pytest.mark.slow
def test_a_correction_makes_up_for_what_code_takes_besides(deep, default, monkeypatch):
    net = deep.budget.net_bytes(budget_at(deep, default, 0.6))
    search = CompiledSearch(deep, deep.base, UNHURRIED)
    evaluate = search.evaluate

    def takes_more(*args):
        found = evaluate(*args)
        return replace(found, step=replace(found.step, peak_bytes=found.peak_bytes + net // 10))

    monkeypatch.setattr(search, "evaluate", takes_more)
    found = search.within(net)
    assert len(search.followed) <= 3
    assert found.peak_bytes <= 0.9 * net


def of_layers(graph):
    """Results of the forward of the layers, by module, op and how often that came before in it."""
    times, found = Counter(), {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and ".blocks." in f".{op.module}.":
            for slot, buffer in enumerate(op.outputs):
                found[op.module, op.target, times[op.module, op.target], slot] = buffer
            times[op.module, op.target] += 1
    return found


@pytest.mark.slow
def test_no_decision_of_plans_by_blocks_is_better_in_the_whole_model():
    case = causal_model(seq=128, vocab=128)
    prepared, blocks = (capture(case.model, case.inputs, regions=regions, backend="inductor")
                        for regions in ("model", "blocks"))
    variant, breakdown = prepared.base, prepared.base.compiled
    names = {buffer: name for name, buffer in of_layers(blocks.base.graph).items()}
    there, search = of_layers(variant.graph), CompiledSearch(prepared, variant, UNHURRIED)
    outside = breakdown.saved_by_default.difference(there.values())
    default = plan_within(prepared, None, UNHURRIED)
    budget = budget_at(prepared, default, 0.8)
    plan = plan_within(prepared, budget, UNHURRIED)
    assert plan.peak_bytes <= budget
    by_blocks = CompiledSearch(blocks, blocks.base, UNHURRIED).within(
        blocks.budget.net_bytes(budget))
    assert by_blocks is not None
    saved = saved_buffers(blocks.base, by_blocks.schedule)
    mapped = {there[names[buffer]] for buffer in saved if names.get(buffer) in there}
    assert mapped
    for choice in (mapped, mapped | outside):
        schedule = schedule_saving(variant, choice)
        extra = (search.cost(schedule) - search.default_cost
                 ) / variant.problem.keep_all_cost
        if extra < plan.overhead:  # then it takes more than there is, in either order
            for strict in (False, True):
                step = breakdown.trace(spec_saving(prepared, choice, strict))
                assert prepared.budget.whole_bytes(step.peak_bytes) > budget
