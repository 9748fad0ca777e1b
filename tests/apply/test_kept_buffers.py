"""Buffers that compiled code keeps for later ones of their size; the same code without any that is
kept, and the allocator's events, are the oracles."""

import itertools
import math

import pytest
import torch
from torch._inductor import config

import planner
from graph_capture.torch_compat import buffer_reuse, cpu_allocations
from tests.support.compiler import needs_compiler
from tests.support.models import step, unet

pytestmark = needs_compiler


def levels_and_allocations(case, plan):
    """What the second step of the applied model takes, and how many buffers of the size of feature
    maps it allocates for that."""
    model = plan.apply(case.model)
    step(case, model)
    case.model.zero_grad(set_to_none=True)
    events = cpu_allocations(lambda: step(case, model))
    return (max(itertools.accumulate(events)),
            sum(size >= 1 << 14 for size in events))


@pytest.mark.slow
def test_kept_buffers_spare_allocations_and_take_no_more_memory(monkeypatch):
    case = unet()
    plan = planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, budget="60%",
                        backend="inductor")
    with config.patch(fx_graph_cache=False):
        peak, allocations = levels_and_allocations(case, plan)
        with monkeypatch.context() as patch:  # none but from one kernel to the next
            patch.setattr(buffer_reuse._PeakOfLines, "peak_between", lambda *args: math.inf)
            bare_peak, bare_allocations = levels_and_allocations(case, plan)
    assert peak == bare_peak
    assert allocations < bare_allocations


def test_levels_of_lines_are_those_of_the_allocator(monkeypatch):
    """The most that the lines of a graph without library kernels say is alive, beside inputs."""
    estimates = []
    of_lines = buffer_reuse._PeakOfLines.__init__

    def noted(self, lines):
        of_lines(self, lines)
        estimates.append(self.overall_peak_memory)

    monkeypatch.setattr(buffer_reuse._PeakOfLines, "__init__", noted)

    def function(x):
        y = (x @ x).relu()
        return ((y @ y).relu() @ y).sin()

    x = torch.randn(64, 64)
    with config.patch(fx_graph_cache=False), buffer_reuse.buffers_kept_below_peak():
        compiled = torch.compile(function)
        with torch.no_grad():
            compiled(x)
            events = cpu_allocations(lambda: compiled(x))
    assert estimates == [max(itertools.accumulate(events))]


@pytest.mark.parametrize(("groups", "made"), [(1, 2), (8, 3)])
def test_no_buffer_is_kept_across_the_gradient_of_a_convolution_by_groups(groups, made):
    """What such a kernel takes for itself is not known: what is made before it is let go, and what
    is made behind it, here of the same size, is allocated."""
    generator = torch.Generator().manual_seed(0)
    image, gradient = (torch.randn(2, 8, 6, 6, generator=generator) for _ in range(2))
    weight = torch.randn(8, 8 // groups, 3, 3, generator=generator)
    x = torch.randn(64, 64, generator=generator)
    wider = torch.randn(512, 64, generator=generator)

    def function(x, wider, image, gradient):
        before = (x @ x).relu().sum()
        _, of_weight, _ = torch.ops.aten.convolution_backward(
            gradient, image + before, weight, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], groups,
            [False, True, False])
        after = (x + of_weight.sum()).cos() @ x
        return after, (wider @ x).cos() @ x + after.sum()

    torch.compiler.reset()
    with (config.patch(fx_graph_cache=False), buffer_reuse.buffers_kept_below_peak(),
          torch.no_grad()):
        compiled = torch.compile(function)
        compiled(x, wider, image, gradient)
        events = cpu_allocations(lambda: compiled(x, wider, image, gradient))
    assert sum(size == x.nbytes for size in events) == made
