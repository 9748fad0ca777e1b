"""What is saved in the place of what takes time to save: single choices are the oracle."""

import random

import pytest
import torch
from torch import nn

from planner.api import capture
from planner.search.cheap_to_recompute import saving_seconds
from planner.search.cheaper_sources import with_cheaper_sources
from planner.search.saving import saved_buffers, schedule_saving
from tests.support.compiler import needs_compiler
from tests.support.inductor import loss_of

pytestmark = needs_compiler


class Block(nn.Module):
    """A residual block with a norm, whose normalised input Inductor would save."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def prepared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *[Block(64) for _ in range(3)])
    return capture(model, torch.randn(256, 64), loss_fn=loss_of, backend="inductor")


@pytest.fixture
def form(prepared):
    return prepared.base


@pytest.fixture
def costs(form):
    return form.compiled.saving_costs


@pytest.fixture
def cost(form, costs):
    return lambda schedule: form.cost(schedule) + saving_seconds(form, schedule, costs)


def peak(form, saved):
    return form.net_peak_bytes(schedule_saving(form, saved))


def normalised(form):
    """What a norm makes before its weight: as large as its input, and read once."""
    graph, found = form.graph, {}
    for buffer in sorted(form.compiled.saving_costs.to_save):
        op = graph.ops[graph.buffers[buffer].producer]
        if "mul" in op.target and op.module.endswith("norm") and (
                graph.buffers[buffer].size_bytes == 256 * 64 * 4):
            found.setdefault(op.module, buffer)  # the first; then comes the weight
    return set(found.values())


def test_the_input_of_a_norm_is_saved_instead_of_what_it_makes(form, costs, cost):
    made = normalised(form)
    assert len(made) == 3
    inputs = {b for op in form.graph.ops if "var_mean" in op.target for b in op.inputs}
    saved = (form.compiled.saved_by_default | made) - inputs
    found = with_cheaper_sources(form, saved, costs, 1 << 40, cost)
    assert made.isdisjoint(found)
    assert inputs <= found
    assert cost(schedule_saving(form, found)) < cost(schedule_saving(form, saved))


@pytest.mark.parametrize("seed", range(12))
def test_never_dearer_and_never_more_than_there_is(form, costs, cost, seed):
    rng = random.Random(seed)
    everything = saved_buffers(form, form.problem.keep_all_schedule)
    saved = frozenset(b for b in everything if rng.random() < rng.choice((0.3, 0.6, 0.9)))
    before = peak(form, saved)
    limit = int(rng.choice((0.9, 1.0, 1.02, 1.2)) * before)
    found = with_cheaper_sources(form, saved, costs, limit, cost)
    assert peak(form, found) <= max(limit, before)
    assert cost(schedule_saving(form, found)) <= cost(schedule_saving(form, saved))
    assert found == saved or cost(schedule_saving(form, found)) < cost(
        schedule_saving(form, saved))
    assert with_cheaper_sources(form, saved, costs, limit, cost) == found


def test_what_is_given_up_for_sources_is_what_costs_least(form, costs, cost):
    made = normalised(form)
    saved = frozenset(form.compiled.saved_by_default | made)
    limit = peak(form, saved)
    found = with_cheaper_sources(form, saved, costs, limit, cost)
    assert peak(form, found) <= limit
    for buffer in found:  # nothing that it still holds could be spared for less
        spared = found - {buffer}
        assert cost(schedule_saving(form, spared)) > cost(schedule_saving(form, found)) or (
            form.graph.buffers[buffer].size_bytes < 0.1 * limit)
