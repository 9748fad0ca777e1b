"""One rank of a data-parallel run, as far as it affects the memory of its training step.

The model of the world: each rank runs the same step on its own batch.  The distribution of the
model determines the resident memory of a rank (whole parameters or shards, buckets) and the memory
of its optimizer.  A wrapper (DDP, fully_shard) allocates buffers and collects gradients at fixed
moments of the step, by hooks of the model's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from planner._graph_capture.training_graph import Category, ResidentMemory

if TYPE_CHECKING:
    from planner._graph_capture.fake_copies.fake import FakeCopy

MakeBuffer = Callable[[int, Category], torch.Tensor]
"""Allocates a buffer of so many bytes and of this kind; buffers of collectives are temporaries."""


class Wrapper:
    """Data parallelism during a step; this base class does nothing."""

    frees: Collection[str] = ()
    """Names of the parameters whose gradients the loop frees as they come."""

    def attached(self, model: nn.Module, make: MakeBuffer) -> AbstractContextManager[None]:
        """Inside, the model has the wrapper's hooks, which allocate buffers with `make`."""
        return nullcontext()

    def finish(self) -> list[torch.Tensor]:
        """End the backward and the step; returns the gradients that are not in `grad`."""
        return []


class RankLayout(Protocol):
    """The layout of a model on one rank."""

    @property
    def resident(self) -> ResidentMemory:
        """Memory between steps, without gradients and the state of the optimizer."""

    def wrapper(self) -> Wrapper:
        """The wrapper that runs during a step."""

    @property
    def whole_gradient_bytes(self) -> int:
        """Bytes of gradients that no rank has reduced yet."""

    @property
    def holds_optimizer(self) -> bool:
        """True if the optimizer's state is in the memory of the device."""

    def share_of(self, optimizer: object) -> tuple[object, FakeCopy]:
        """The optimizer of the rank with the most state, and a fake copy of the parameters that it
        updates."""
