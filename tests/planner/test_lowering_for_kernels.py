"""The problem of a compiled step: what stays within a kernel; the generated code is the oracle."""

import pytest

from planner.api import capture
from planner.search.compiled_search import CompiledSearch
from planner.search.effort import Effort
from planner.step.lowering import within_kernels
from solvers.problem import Op, Problem, Storage
from solvers.simulator import unroll
from tests.support.compiler import needs_compiler
from tests.support.models import unet


def chain(*readers):
    """Op i makes storage i of 2**i bytes; `readers[i]`: what op i reads."""
    return Problem(
        ops=tuple(Op(f"op {i}", 1.0, reads, (i,), inplace=reads[:1] if i == 1 else ())
                  for i, reads in enumerate(readers)),
        storages=tuple(Storage(2 ** (0 if i == 1 else i), i) for i in range(len(readers))))


def test_what_is_computed_within_a_kernel_takes_nothing_and_holds_what_it_is_made_of():
    problem = chain((), (0,), (1,), (), (2,), (4, 3))
    assert problem.ops[1].inplace  # storage 1 takes over the buffer of 0
    fused = within_kernels(problem, frozenset({1, 2}))
    assert [op.inputs for op in fused.ops] == [(), (0,), (1, 0), (), (2, 1, 0), (4, 3)]
    assert [storage.size_bytes for storage in fused.storages] == [1, 0, 0, 8, 16, 32]
    assert not fused.ops[1].inplace
    # Storage 0 is alive until op 4, which computes 1 and 2 from it.
    assert unroll(fused, fused.keep_all_schedule).memory_bytes == (1, 1, 1, 9, 25, 56)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("fraction", [0.6, 0.45])
def test_the_code_of_a_u_net_takes_what_its_ops_are_said_to_take(fraction):
    """Without what is read until a kernel runs, it took 15% more than they said."""
    case = unet()
    prepared = capture(case.model, case.args, loss_fn=case.loss_fn, backend="inductor")
    search = CompiledSearch(prepared, prepared.base, Effort(time_limit=100.0, work_limit=20.0))
    net = int(fraction * search.default().step.peak_bytes)
    for schedule in search.proposals.within(net):
        account = search.net_peak_bytes(schedule)
        assert search.judge(schedule, strict_order=True).step.peak_bytes <= 1.03 * account
