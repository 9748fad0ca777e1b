"""Which kernels become one function of Inductor's C++ code; the same code without that choice, and
the allocator's events, are the oracles."""

import contextlib
import itertools

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from graph_capture.torch_compat import cpu_allocations
from graph_capture.torch_compat.kernel_functions import functions_below_peak
from tests.support.compiler import needs_compiler

pytestmark = [pytest.mark.compat, needs_compiler]

WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8
WIDE = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
NARROW = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))


def unrelated_kernels(operand, other):
    """Between two products, a kernel that is done with the first and one that makes the operand of
    the second."""
    total = (operand @ WEIGHT).sum(dim=1)
    return total, other.cos() @ WEIGHT[:, :1]


def beside_more(operand, other, wider):
    return *unrelated_kernels(operand, other), (wider @ WEIGHT).cos() @ WEIGHT


def outputs_peak_and_calls(function, *args, chosen):
    torch.compiler.reset()
    with (config.patch(fx_graph_cache=False), torch.no_grad(),
          chosen() if chosen else contextlib.nullcontext()):
        compiled = torch.compile(function)
        outputs, (code,) = run_and_get_code(compiled, *args)
        events = cpu_allocations(lambda: compiled(*args))
    calls = sum(line.strip().startswith("cpp_fused") and "(" in line and "=" not in line
                for line in code.splitlines())
    return outputs, max(itertools.accumulate(events)), calls


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
