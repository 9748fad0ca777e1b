"""The memory of one compiled graph: its generated code, run by itself on fake tensors.

Sizes of inputs decide how Inductor fuses and orders kernels; so a plan made for one size says how
much the code of each of its graphs takes, and what is generated for a smaller size is held against
that.  Where no graph takes more, and none leaves more, the step does not either.

Blind spots: those of `compiled_step`; here, workspace of library kernels is left out on both sides.
A smaller step is compiled while the user's program runs, perhaps under a profiler, where no kernel
can be measured; margins on both sides would hide that other tensors take more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from planner._graph_capture.memory.tracker import MemoryTracker
from planner._graph_capture.torch_compat import FakeTensor
from planner._graph_capture.training_graph import CodeMemory


class CodeTracker(MemoryTracker):
    """Follows the storages of compiled code, without keeping Dynamo from running it."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Under any other mode Dynamo would run the original code."""
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
