"""Collectives of gloo that can be measured: no other thread keeps their buffers alive on return.

Otherwise the scheduler decides how long a thread of gloo keeps gathered buffers alive, and whether
their release is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from planner._graph_capture.torch_compat.memory import use_counts

SETTLING_SECONDS = 5.0
"""The longest wait."""

# torch 2.13 has a new name for it.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Settled:
    """Communication of fully_shard whose buffers this thread is the last to release."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype,
                 device: torch.device) -> torch.Tensor:
        """Return a buffer, as fully_shard makes it by default."""
        return torch.empty(*size, dtype=dtype, device=device)


class _SettledAllGather(_Settled):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor,
                 group: dist.ProcessGroup, async_op: bool = False) -> None:
        _settle(partial(_ALL_GATHER, group=group), output_tensor, input_tensor)


class _SettledReduceScatter(_Settled):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor,
                 group: dist.ProcessGroup, op: Any, async_op: bool = False) -> None:
        whole = input_tensor.clone()  # as gloo does, which then keeps it to itself
        _settle(partial(dist.all_reduce, group=group, op=op), whole)
        output_tensor.copy_(whole.view(group.size(), -1)[group.rank()])


def _settle(collective: Callable[..., dist.Work | None], *tensors: torch.Tensor) -> None:
    """Run a collective, and wait until only the caller keeps its tensors alive."""
    held = [use_counts(tensor) for tensor in tensors]
    collective(*tensors, async_op=True).wait()
    until = time.monotonic() + SETTLING_SECONDS
    while [use_counts(tensor) for tensor in tensors] != held and time.monotonic() < until:
        time.sleep(0.001)


def settle_collectives(unit: FSDPModule) -> None:
    """Make gloo's threads release the buffers of a sharded module when the collective ends."""
    unit.set_custom_all_gather(_SettledAllGather())
    unit.set_custom_reduce_scatter(_SettledReduceScatter())
