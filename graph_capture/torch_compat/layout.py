"""The layout of a tensor in its storage."""

from __future__ import annotations

import torch

from planner._graph_capture.torch_compat.symbols import same_sizes


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements lie side by side, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if not same_sizes([stride], [expected]):
            return False
        expected *= size
    return True
