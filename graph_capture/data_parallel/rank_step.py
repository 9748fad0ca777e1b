"""The memory of the plain training step on one rank of a data-parallel run.

The figures are those of one traced forward, loss and backward
(`graph_capture.plain_step.micro_batch`) with the hooks of the rank's wrapper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.memory.trace import COMMUNICATION, Block, Category
from planner._graph_capture.memory.tracker import Workspace
from planner._graph_capture.plain_step.loss import LossFn
from planner._graph_capture.plain_step.micro_batch import trace_micro_batch
from planner._graph_capture.rank import Wrapper


@dataclass(frozen=True, slots=True)
class ParallelStep:
    """Forward, loss and backward on one rank, above what is resident there."""

    peak_bytes: int
    by_category: Mapping[str, int]
    """Bytes at the peak, of `unsharded_parameters`, `gradients`, `activations`, `temporaries` and
    `communication`; they sum to `peak_bytes`."""
    end_gradients_bytes: int
    """Gradients that are left after the backward, apart from those in buckets."""
    end_activations_bytes: int
    """Storages that the output keeps alive after the backward."""


def trace_parallel_step(fake_copy: FakeCopy, wrapper: Wrapper, loss_fn: LossFn | None = None, *,
                        workspace: Workspace) -> ParallelStep:
    """Trace one step of the fake copy's model under `wrapper`.

    Raises `CaptureError` if there is nothing to differentiate; an error of the model propagates.
    """
    step = trace_micro_batch(fake_copy, loss_fn, workspace=workspace, wrapper=wrapper)
    trace = step.trace
    at_peak: Counter[str] = Counter()
    for number in trace.alive_at_peak():
        at_peak[_category(trace.blocks[number])] += trace.blocks[number].size_bytes
    left = {category: sum(trace.blocks[number].size_bytes
                          for number in trace.alive_after(len(trace.events))
                          if (trace.blocks[number].category is Category.GRADIENTS) is gradients)
            for category, gradients in (("gradients", True), ("activations", False))}
    return ParallelStep(trace.peak_bytes, at_peak, left["gradients"], left["activations"])


def _category(block: Block) -> str:
    if block.category is Category.PARAMETERS:
        return "unsharded_parameters"
    return "communication" if block.label == COMMUNICATION else block.category.value
