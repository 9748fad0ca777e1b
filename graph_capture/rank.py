"""One rank of a data-parallel run, as far as the memory of its training step goes.

The model of the world: each rank runs the same step on a batch of its own.  How the model is spread
decides what is resident on a rank (whole parameters or shards, buckets) and what its optimizer
takes; a wrapper (DDP, fully_shard) makes buffers and takes gradients at fixed moments while the
step runs, by hooks of the model's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from planner._graph_capture.training_graph import BufferKind, ResidentMemory

if TYPE_CHECKING:
    from planner._graph_capture.fake_copies.fake import FakeCopy

MakeBuffer = Callable[[int, BufferKind], torch.Tensor]
"""Makes a buffer of so many bytes, and is told what it is; those of collectives are temporaries."""


class Wrapper:
    """What data parallelism does while a step runs; this one does nothing."""

    def attached(self, model: nn.Module, make: MakeBuffer) -> AbstractContextManager[None]:
        """Inside, the model has the wrapper's hooks, which make buffers by `make`."""
        return nullcontext()

    def finish(self) -> list[torch.Tensor]:
        """The end of the backward, and of the step; returns what is left of the gradients elsewhere
        than in `grad`."""
        return []


class RankLayout(Protocol):
    """How one rank holds a model."""

    @property
    def resident(self) -> ResidentMemory:
        """Held between steps, but for gradients and the state of the optimizer."""

    def wrapper(self) -> Wrapper:
        """What runs along with a step."""

    @property
    def whole_gradient_bytes(self) -> int:
        """Of gradients that no rank has reduced yet."""

    @property
    def holds_optimizer(self) -> bool:
        """Whether the optimizer's state is in the memory of the device."""

    def share_of(self, optimizer: object) -> tuple[object, FakeCopy]:
        """The optimizer of the rank that holds most of its state, and a fake copy of what it
        updates."""
