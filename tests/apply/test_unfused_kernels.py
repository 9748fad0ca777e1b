"""Which kernels that read the same become one; Inductor's own choice, and the allocator's events,
are the oracles."""

from contextlib import nullcontext

import pytest
import torch
from torch._inductor import config

from planner._graph_capture.torch_compat.scheduler_pass import UnfusedKernels
from tests.support.compiler import needs_compiler
from tests.support.generated_code import WEIGHT, WIDE, outputs_peak_and_code

pytestmark = [pytest.mark.compat, needs_compiler]


def read_by_both(operand):
    """A product of something that is made of the operand; then something else that is."""
    return operand.cos() @ WEIGHT[:, :1], (operand @ WEIGHT) * operand.sin()


def beside_more(operand):
    return *read_by_both(operand), ((operand @ WEIGHT).cos() @ WEIGHT).repeat(4, 1) @ WEIGHT


def through_a_result(operand):
    """As `read_by_both`, where what both read is itself made by the kernel that they share."""
    shared = operand.sigmoid()
    other = operand @ WEIGHT
    return (shared * 2) @ WEIGHT[:, :1], (other * shared) @ WEIGHT[:, :1], other.T @ operand


def outputs_peak_and_kernels(function, operand, *, apart):
    chosen = config.patch(_post_fusion_custom_pass=UnfusedKernels()) if apart else nullcontext()
    outputs, peak, code = outputs_peak_and_code(function, operand, inside=chosen)
    return outputs, peak, code.count("async_compile.cpp_pybinding(")


@pytest.mark.parametrize("function", [read_by_both, through_a_result])
def test_kernels_that_read_the_same_are_two_where_one_would_hold_more(function):
    outputs, peak, kernels = outputs_peak_and_kernels(function, WIDE, apart=True)
    as_ever, higher_peak, fewer = outputs_peak_and_kernels(function, WIDE, apart=False)
    assert all(map(torch.equal, outputs, as_ever))
    assert higher_peak - peak >= 0.9 * WIDE.nbytes
    assert kernels == fewer + 1


def test_kernels_that_read_the_same_are_one_where_the_peak_is_elsewhere():
    _, peak, kernels = outputs_peak_and_kernels(beside_more, WIDE, apart=True)
    assert outputs_peak_and_kernels(beside_more, WIDE, apart=False)[1:] == (peak, kernels)


def updating(operand):
    """What both read is written over at the end, by what one of them makes, in another order."""
    first, second = read_by_both(operand)
    operand.copy_(second.flip(0))
    return first


def test_what_is_written_over_is_read_before():
    given = WIDE.clone(), WIDE.clone()
    outputs = [outputs_peak_and_kernels(updating, operand, apart=apart)[0]
               for operand, apart in zip(given, (True, False), strict=True)]
    assert torch.equal(*outputs) and torch.equal(*given)


def test_a_graph_without_kernels_stays_as_it_is():
    torch.compiler.reset()
    with config.patch(_post_fusion_custom_pass=UnfusedKernels(), fx_graph_cache=False):
        assert torch.equal(torch.compile(torch.t)(WIDE), WIDE.T)
