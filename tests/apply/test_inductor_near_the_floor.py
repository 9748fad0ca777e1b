"""Compiled plans for budgets near the least: what is copied, what is stored.

The oracles: the allocator's events, gradients of `torch.compile`.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx

from planner._apply.inductor import realize_across_library_calls
from planner._graph_capture.inductor.within_kernels import Fusion, fusion_of
from planner._graph_capture.joint_graph.low_peak_backward import REALIZED_COPY
from planner._graph_capture.torch_compat.inductor import is_stored
from planner.api import capture
from planner.plans.file import dumps, loads
from planner.search.compiled import smallest_plan
from planner.search.variants import Effort
from tests.support.compiler import needs_compiler
from tests.support.models import Case, unet
from tests.support.training import measured_peak, train

pytestmark = needs_compiler


# --- What is stored -------------------------------------------------------------------------------


def graph_of(build) -> fx.Graph:
    """A graph of ATen ops on tensors of 4 kB; `build(op, x)` adds them, and returns the result."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(32, 32)

    def op(target, *args):
        node = graph.call_function(target, args)
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        node.meta["val"] = target(*values)
        return node

    graph.output((build(op, x),))
    return graph


def stored(graph: fx.Graph) -> list[str]:
    realize_across_library_calls(graph)
    return [node.name for node in graph.nodes if is_stored(node)]


aten = torch.ops.aten


def test_what_is_read_behind_a_kernel_of_a_library_is_stored_where_it_is_made():
    def build(op, x):
        waits = op(aten.sin.default, op(aten.mm.default, x, x))
        soon = op(aten.cos.default, waits)
        return op(aten.add.Tensor, op(aten.mm.default, soon, x), waits)

    assert stored(graph_of(build)) == ["sin_default"]


def test_views_of_it_read_it():
    def build(op, x):
        waits = op(aten.t.default, op(aten.sin.default, x))
        product = op(aten.mm.default, x, x)
        return op(aten.add.Tensor, product, waits)

    assert stored(graph_of(build)) == ["sin_default"]


def test_what_is_made_of_less_is_computed_anew():
    def build(op, x):
        row = op(aten.sum.dim_IntList, x, [0])
        wide = op(aten.expand.default, op(aten.sin.default, row), [32, 32])
        wide = op(aten.clone.default, wide)
        nothing = op(aten.full.default, [32, 32], 1.0)
        product = op(aten.mm.default, x, x)
        return op(aten.add.Tensor, op(aten.add.Tensor, product, wide), nothing)

    names = stored(graph_of(build))
    assert "clone_default" not in names
    assert "full_default" not in names


def test_one_result_of_several_can_wait():
    def build(op, x):
        pooled = op(torch.ops.prims._low_memory_max_pool_with_offsets.default,
                    op(aten.view.default, op(aten.sin.default, x), [1, 1, 32, 32]),
                    [2, 2], [2, 2], [0, 0], [1, 1], False)
        values, offsets = (op(operator.getitem, pooled, i) for i in (0, 1))
        flat = op(aten.view.default, values, [16, 16])
        product = op(aten.mm.default, flat, flat)
        return op(aten.add.Tensor, product, op(aten.view.default, offsets, [16, 16]))

    assert stored(graph_of(build)) == ["getitem_1"]


# --- Gradients that are copied --------------------------------------------------------------------


def small() -> Case:
    return unet(batch=4, image=32, depth=1)


@pytest.fixture(scope="module")
def prepared():
    case = small()
    return capture(case.model, case.inputs, loss_fn=case.loss_fn, backend="inductor")


def test_the_copy_is_a_buffer_and_costs_time(prepared):
    variant = prepared.variants[1]
    assert variant.low_peak
    copies = [op for op in variant.graph.ops
              if op.target == "checkpoint_planner.realized_copy.default"]
    assert copies
    assert all(op.seconds > 0 for op in copies)
    assert all(variant.graph.buffers[op.outputs[0]].size_bytes > 0 for op in copies)
    assert 0 < variant.extra_seconds <= sum(op.seconds for op in copies) * 1.01
    part = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)[:, :2]
    assert torch.equal(REALIZED_COPY(part), part)
    assert REALIZED_COPY(part).untyped_storage().nbytes() == part.numel() * part.element_size()


def test_pools_belong_to_generated_kernels(prepared):
    names = {"prims._low_memory_max_pool_with_offsets.default": Fusion.REDUCTION,
             "prims._low_memory_max_pool_offsets_to_indices.default": Fusion.POINTWISE}
    for target, kind in names.items():
        packet = target.split(".")[1]
        node = fx.Graph().call_function(getattr(torch.ops.prims, packet).default, ())
        assert fusion_of(node) is kind
        assert any(op.target == target for op in prepared.base.graph.ops)


@pytest.mark.slow
def test_the_smallest_low_peak_step_takes_what_was_predicted_with_the_same_gradients(prepared):
    case = small()
    plan = smallest_plan(replace(prepared, variants=prepared.variants[1:]), Effort())
    assert plan.spec.low_peak
    assert any("copied" in note for note in plan.notes)
    again = loads(dumps(plan))
    assert again == plan
    model = again.apply(case.model)
    expected, found = (torch.cat([gradient.double().flatten() for gradient in
                                  train(compiled, case).gradients.values()])
                       for compiled in (torch.compile(case.model), model))
    assert float((found - expected).norm() / expected.norm()) <= 1e-5
    assert measured_peak(model, case) == plan.peak_bytes - prepared.resident_bytes
