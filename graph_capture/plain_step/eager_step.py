"""The memory of the training step as plain PyTorch runs it, as the user has it today.

The figures are those of one traced forward, loss and backward
(`graph_capture.plain_step.micro_batch`) that starts with gradients of `None`, as after
`zero_grad()`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.memory.trace import Category, MicroBatch
from planner._graph_capture.memory.tracker import Workspace
from planner._graph_capture.plain_step.loss import LossFn, LossFootprint, trace_loss
from planner._graph_capture.plain_step.micro_batch import trace_micro_batch
from planner._graph_capture.rank import Wrapper
from planner._graph_capture.training_graph import BufferKind


@dataclass(frozen=True, slots=True)
class EagerStep:
    """Memory of one plain training step, above what is resident."""

    peak_bytes: int
    by_category: Mapping[BufferKind, int]
    """Bytes of each kind at the peak; they sum to `peak_bytes`.  Workspace is a temporary."""
    forward_peak_bytes: int
    """Maximum before the backward begins, the loss included."""
    end_bytes: int
    """Memory left when the step ends and its output is released: the gradients."""
    with_gradient: frozenset[str]
    """Names of the parameters that get a gradient."""
    loss: LossFootprint
    storage_less: bool
    """True if the code ran on storage-less tensors, which look ordinary to it; false for fake
    tensors, which some libraries treat differently."""
    memory_timeline: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Maximum of bytes from each op's run to the next one."""
    backward_begins: int = field(default=0, compare=False)
    """Number of runs before the backward."""
    blocks: MicroBatch | None = field(default=None, compare=False, repr=False)
    """All blocks that it allocates and frees, in order."""


def trace_eager_step(fake_copy: FakeCopy, loss_fn: LossFn | None = None, *, workspace: Workspace,
                     with_gradient: Collection[str] = (), holds_output: bool = True,
                     wrapper: Wrapper | None = None) -> EagerStep:
    """Trace forward, loss and backward of the fake copy.  It has no gradients before and after,
    except those of the parameters in `with_gradient`, which are resident.  `wrapper`: data
    parallelism during the step.

    Raises `CaptureError` if there is nothing to differentiate; an error of the model propagates.
    """
    footprint: list[LossFootprint] = []

    def look(running: FakeCopy, output: Any, loss: LossFn | None) -> None:
        footprint[:] = [trace_loss(loss, output, running, workspace)]

    step = trace_micro_batch(fake_copy, loss_fn, workspace=workspace,
                             with_gradient=with_gradient, holds_output=holds_output, look=look,
                             wrapper=wrapper)
    trace = step.trace
    at_peak = trace.by_category(trace.alive_at_peak())
    return EagerStep(
        peak_bytes=trace.peak_bytes,
        by_category={kind: at_peak[Category(kind.value)] for kind in BufferKind},
        forward_peak_bytes=trace.until(step.backward_begins).peak_bytes,
        end_bytes=sum(trace.blocks[block].size_bytes
                      for block in (*step.gradients, *step.left_blocks)),
        with_gradient=step.with_gradient, loss=footprint[0],
        storage_less=step.storage_less, memory_timeline=tuple(trace.levels_by_run()),
        backward_begins=sum(run.event < step.backward_begins for run in trace.runs), blocks=step)
