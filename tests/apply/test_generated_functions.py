"""Which kernels become one function of Inductor's C++ code; the same code without that choice, and
the allocator's events, are the oracles."""

from contextlib import nullcontext

import pytest
import torch

from graph_capture.torch_compat.kernel_functions import functions_below_peak
from tests.support.compiler import needs_compiler
from tests.support.generated_code import WEIGHT, WIDE, outputs_peak_and_code

pytestmark = [pytest.mark.compat, needs_compiler]

NARROW = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))


def unrelated_kernels(operand, other):
    """Between two products, a kernel that is done with the first and one that makes the operand of
    the second."""
    total = (operand @ WEIGHT).sum(dim=1)
    return total, other.cos() @ WEIGHT[:, :1]


def beside_more(operand, other, wider):
    return *unrelated_kernels(operand, other), (wider @ WEIGHT).cos() @ WEIGHT


def outputs_peak_and_calls(function, *args, chosen):
    outputs, peak, code = outputs_peak_and_code(
        function, *args, inside=chosen() if chosen else nullcontext())
    calls = sum(line.strip().startswith("cpp_fused") and "(" in line and "=" not in line
                for line in code.splitlines())
    return outputs, peak, calls


def test_a_function_ends_where_it_would_hold_more_than_its_kernels_one_by_one():
    outputs, peak, calls = outputs_peak_and_calls(
        unrelated_kernels, WIDE, WIDE.flip(0), chosen=functions_below_peak)
    as_ever, higher_peak, fewer_calls = outputs_peak_and_calls(
        unrelated_kernels, WIDE, WIDE.flip(0), chosen=None)
    assert all(map(torch.equal, outputs, as_ever))
    assert higher_peak - peak >= 0.9 * WIDE.nbytes
    assert (fewer_calls, calls) == (1, 2)


def test_kernels_stay_in_one_function_where_that_takes_no_more():
    *_, calls = outputs_peak_and_calls(
        beside_more, NARROW, NARROW.flip(0), WIDE, chosen=functions_below_peak)
    *_, as_ever = outputs_peak_and_calls(
        beside_more, NARROW, NARROW.flip(0), WIDE, chosen=None)
    assert calls == as_ever


def test_each_kernel_is_a_function_where_layers_are_left_out():
    *_, calls = outputs_peak_and_calls(
        beside_more, NARROW, NARROW.flip(0), WIDE,
        chosen=lambda: functions_below_peak(lambda: False))
    *_, as_ever = outputs_peak_and_calls(
        beside_more, NARROW, NARROW.flip(0), WIDE, chosen=None)
    assert calls == as_ever + 1
