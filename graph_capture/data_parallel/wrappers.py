"""The allocations of DistributedDataParallel and fully_shard while a step runs.

DDP's buckets exist from the start, so only the end of each gradient is traced: with
`gradient_as_bucket_view` it goes into its bucket as soon as it is computed.

Blind spots: those of `graph_capture.data_parallel.fully_sharded`; DDP's broadcast of buffers at the
start of the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from planner._graph_capture.data_parallel.fully_sharded import FullySharded, Precision, make_units
from planner._graph_capture.rank import MakeBuffer, Wrapper


class IntoBuckets(Wrapper):
    """Frees each gradient once it is computed: it is in its bucket (`gradient_as_bucket_view`)."""

    @contextlib.contextmanager
    def _attached(self, model: nn.Module) -> Iterator[None]:
        hooks = [parameter.register_post_accumulate_grad_hook(_release_gradient)
                 for parameter in model.parameters() if parameter.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def attached(self, model: nn.Module, make: MakeBuffer) -> AbstractContextManager[None]:
        return self._attached(model)


class Sharded(Wrapper):
    """Fully sharded parameters, gradients and optimizer state."""

    def __init__(self, units: Sequence[tuple[str, ...]], ranks: int, *,
                 reshard_after_forward: bool | None = None, kept: Collection[str] = (),
                 library_copies: bool = False, precision: Precision | None = None) -> None:
        """`reshard_after_forward`, `kept`: see `make_units`; the others: see `FullySharded`."""
        self._units, self._ranks = units, ranks
        self._reshard_after_forward, self._kept = reshard_after_forward, kept
        self._library_copies, self._precision = library_copies, precision
        self._runtime: FullySharded | None = None

    def attached(self, model: nn.Module, make: MakeBuffer) -> AbstractContextManager[None]:
        self._runtime = FullySharded(
            make_units(model, self._units, self._reshard_after_forward, self._kept), self._ranks,
            library_copies=self._library_copies, precision=self._precision)
        return self._runtime.attached(make)

    def finish(self) -> list[torch.Tensor]:
        assert self._runtime is not None
        return self._runtime.finish()


def _release_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
