"""What never leaves a generated kernel, and what its results are written over; the generated code
is the oracle."""

import pytest
import torch
from torch import nn

from planner._graph_capture.training_graph import Phase
from planner.api import capture
from planner.search.compiled_search import CompiledSearch
from planner.search.variants import Effort
from tests.support.compiler import needs_compiler
from tests.support.models import unet

pytestmark = needs_compiler


class Gated(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        gate, up = self.gate(x), self.up(x)
        return self.down(gate.exp().sin() * up.exp().cos())


def prepare(model, *shape):
    torch.manual_seed(0)
    return capture(model, (torch.randn(*shape),), backend="inductor",
                   loss_fn=lambda output: output.square().mean())


def graph_of(model, *shape):
    return prepare(model, *shape).base.graph


def makers(graph, buffers):
    return {graph.ops[graph.buffers[buffer].producer].target for buffer in buffers}


def inner_gradient(graph, size_bytes):
    """The op of the backward that makes a gradient of so many bytes of two or more operands of that
    size, where chains of ops are inlined."""
    (found,) = [op for op in graph.ops if op.phase is Phase.BACKWARD and len(op.outputs) == 1
                and graph.buffers[op.outputs[0]].size_bytes == size_bytes
                and sum(graph.buffers[b].size_bytes == size_bytes for b in op.inputs) > 1]
    return found


def test_who_reads_what_stays_within_a_kernel_reads_what_it_is_made_of():
    graph = graph_of(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), 128, 32)
    within = [index for index, buffer in enumerate(graph.buffers) if not buffer.size_bytes]
    assert within
    for op in graph.ops:
        for buffer in set(op.inputs).intersection(within):
            assert set(graph.ops[graph.buffers[buffer].producer].inputs) <= set(op.inputs)


def test_a_chain_of_ops_may_write_over_what_it_begins_with():
    graph = graph_of(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), 128, 32)
    op = inner_gradient(graph, 128 * 64 * 4)
    assert "aten.mm.default" in makers(graph, op.inplace)  # the gradient of what GELU makes
    assert all(graph.buffers[buffer].size_bytes for buffer in op.inplace)


def test_what_two_results_are_made_of_is_not_written_over_by_a_chain():
    graph = graph_of(Gated(), 128, 32)
    results = [op for op in graph.ops if op.phase is Phase.BACKWARD
               and graph.buffers[op.outputs[0]].size_bytes == 128 * 32 * 4
               and op.target == "aten.mul.Tensor" and "aten.mm.default" in makers(graph, op.inputs)]
    direct, through_chain = sorted(results, key=lambda op: len(op.inputs))
    assert len(direct.inputs) == 2 < len(through_chain.inputs)
    assert "aten.mm.default" not in makers(graph, through_chain.inplace)
    assert "aten.exp.default" in makers(graph, through_chain.inplace)


@pytest.mark.slow
def test_code_takes_what_ops_are_said_to_take():
    """Of a U-Net it took 15% more before what stays within its kernels was accounted for.  It may
    take less, by what its kernels write over besides."""
    case = unet()
    prepared = capture(case.model, case.inputs, loss_fn=case.loss_fn, backend="inductor")
    search = CompiledSearch(prepared, prepared.base, Effort(time_limit=1000.0, work_limit=10.0))
    net = int(0.6 * search.default().peak_bytes)
    schedule = search.schedule_within(net)
    breakdown = search.variant.net_peak_bytes(schedule)
    code = search.evaluate(schedule, kernel_order=True).peak_bytes
    assert 0.8 * breakdown <= code <= 1.08 * breakdown  # 1.076 without AVX-512
