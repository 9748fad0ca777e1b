"""The memory of one compiled graph: its generated code, run by itself on fake tensors.

Input sizes decide how Inductor fuses and orders kernels.  So a plan for one size records the memory
of each graph's code, and the code for a smaller size is compared with it.  If no graph uses more
and none leaves more, neither does the step.

Blind spots: those of `compiled_step`; workspace of library kernels is left out on both sides of the
comparison.  A smaller step is compiled while the user's program runs, perhaps under a profiler,
where no kernel can be measured, and margins on both sides would hide other tensors that use more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from planner._graph_capture.memory.tracker import MemoryTracker
from planner._graph_capture.torch_compat import FakeTensor
from planner._graph_capture.training_graph import CodeMemory


class CodeTracker(MemoryTracker):
    """Tracks the storages of compiled code; Dynamo still runs that code."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: under any other mode Dynamo would run the original code."""
        return True


def memory_of_code(compiled: Any, inputs: Sequence[Any]) -> CodeMemory:
    """Memory of a graph compiled by Inductor, run on new tensors like `inputs`, which are fake."""
    from planner._graph_capture.torch_compat.inductor import stub_of

    tensors = [value for value in inputs if isinstance(value, FakeTensor)]
    if not tensors:
        return CodeMemory(0, 0)
    run = stub_of(compiled)
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"),
                  tensors[0].device)
    tracker = CodeTracker(lambda *_: 0, device=device, trace_device=device, resident=())
    with tensors[0].fake_mode, torch.no_grad(), tracker:
        args = [torch.empty_strided(value.size(), value.stride(), dtype=value.dtype,
                                    device=value.device)
                if isinstance(value, torch.Tensor) else value for value in inputs]
        outputs = run(args)
        left = tracker.live_bytes
        tracker.close()
    del outputs
    return CodeMemory(tracker.peak_bytes, left)
