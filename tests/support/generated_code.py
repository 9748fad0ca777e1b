"""Functions that Inductor compiles, and the memory of their code."""

import itertools
from contextlib import AbstractContextManager

import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from planner._graph_capture.torch_compat import cpu_allocations

WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8
WIDE = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))


def outputs_peak_and_code(function, *args, inside: AbstractContextManager):
    """Compile a function inside of a context; return its outputs, the allocator's peak in its
    second call, and its code."""
    torch.compiler.reset()
    with config.patch(fx_graph_cache=False), torch.no_grad(), inside:
        compiled = torch.compile(function)
        outputs, (code,) = run_and_get_code(compiled, *args)
        (events,) = cpu_allocations(lambda: compiled(*args))
    return outputs, max(itertools.accumulate(events)), code
