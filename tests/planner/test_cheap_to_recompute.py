"""What a compiled step had better not save: the cost of every single choice is the oracle."""

import random
from dataclasses import replace

import pytest
import torch

from planner._graph_capture.training_graph import Phase, SavingCosts
from planner.api import capture
from planner.search.compiled_search import (
    saved_buffers,
    saving_seconds,
    schedule_saving,
    without_cheap,
)
from tests.support.compiler import needs_compiler
from tests.support.inductor import batch, loss_of, make_model

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def prepared():
    return capture(make_model(layers=2), batch(), loss_fn=loss_of, backend="inductor")


def cost(prepared, saved, costs):
    schedule = schedule_saving(prepared.base, saved)
    return prepared.base.cost(schedule) + saving_seconds(prepared.base, schedule, costs)


@pytest.mark.parametrize("seed", range(8))
def test_no_single_result_is_cheaper_to_give_up(prepared, seed):
    variant, graph = prepared.base, prepared.base.graph
    rng = random.Random(seed)
    everything = saved_buffers(variant, variant.problem.keep_all_schedule)
    saved = frozenset(b for b in everything if rng.random() < 0.8)
    # Costs of the same order as the ops', so that some are worth their while and some are not.
    costs = SavingCosts({b: rng.choice((0.1, 1.0, 10.0)) * seconds
                         for b, seconds in variant.compiled.saving_costs.to_save.items()})
    kept = without_cheap(variant, saved, costs)
    assert kept <= saved
    least = cost(prepared, kept, costs)
    assert least <= cost(prepared, saved, costs) + 1e-12
    read = {b for op in graph.ops if op.phase is Phase.BACKWARD and op.digest for b in op.inputs}
    for buffer in kept & costs.to_save.keys() & read:
        assert cost(prepared, kept - {buffer}, costs) >= least - 1e-12


def test_masks_of_dropouts_are_drawn_again_on_a_cpu(prepared):
    graph, compiled = prepared.base.graph, prepared.base.compiled
    masks = {b for b in compiled.saved_by_default
             if "gt" in graph.ops[graph.buffers[b].producer].target}
    assert masks <= compiled.saving_costs.to_save.keys()
    kept = without_cheap(prepared.base, compiled.saved_by_default, compiled.saving_costs)
    assert len(masks) == 2
    assert masks.isdisjoint(kept)


def test_what_reading_its_sources_costs_keeps_a_result(prepared):
    graph = prepared.base.graph
    saved, costs = prepared.base.compiled.saved_by_default, prepared.base.compiled.saving_costs
    dear = replace(costs, to_read=dict.fromkeys(range(len(graph.buffers)), 1.0))
    given_up = saved - without_cheap(prepared.base, saved, dear)
    for buffer in given_up:  # made from nothing that would have to be read
        assert "gt" in graph.ops[graph.buffers[buffer].producer].target or not (
            set(graph.ops[graph.buffers[buffer].producer].inputs))


def test_what_a_library_reads_is_in_memory_anyway():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    prepared = capture(model, torch.randn(4, 8), loss_fn=loss_of, backend="inductor")
    graph, to_save = prepared.base.graph, prepared.base.compiled.saving_costs.to_save
    read = {b for op in graph.ops if "mm" in op.target for b in op.inputs}
    assert to_save
    assert to_save.keys().isdisjoint(read)
