"""Predict the memory that torch reserves on a GPU for training, which includes allocated memory.

Model of the world: the blocks of a whole training loop (`planner.step.loop_trace`) are replayed on
a model of torch's caching allocator (`graph_capture.memory.caching_allocator`): loading, the first
step, in which the optimizer allocates its state, a later one, and that again until the reserved
memory no longer grows.  Torch does not return reserved memory.

cuBLAS keeps a workspace for each thread that has multiplied matrices: the thread of the forward and
autograd's thread of the backward.  Both come from the same allocator, so they are reserved memory,
too.

Blind spots: those of the allocator's model; memory outside torch's allocator (the CUDA context and
the buffers of NCCL); allocations of other user code; for several ranks the streams of their
wrappers, which share no blocks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch import __version__

from planner._graph_capture.capture import CapturedStep
from planner._graph_capture.memory.caching_allocator import (
    CachingAllocator,
    Handle,
    replay,
    takes_first_made,
)
from planner._graph_capture.memory.trace import Block, MicroBatch
from planner._graph_capture.optimizer.step import OptimizerTrace
from planner._graph_capture.training_graph import TrainingGraph
from planner.solvers.simulator import Timeline
from planner.step.loop_trace import LoopTrace, MicroBatches, StepPhase, TrainingLoop, compose
from planner.step.planned_micro_batch import planned_micro_batch

_MOST_STEPS = 4
"""Limit on replayed steps."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of torch's allocator; the first that is set counts."""
_MATRIX_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm")


def expandable_segments() -> bool:
    """True if the environment sets expandable segments in torch."""
    settings = next((os.environ[name] for name in _SETTINGS if name in os.environ), "")
    words = settings.replace(" ", "").split(",")
    return "expandable_segments:True" in words


def reserved_by(loop: LoopTrace, workspace_bytes: int = 0, *, expandable: bool = False) -> int:
    """Reserved memory, by replaying loading and two steps, and the second one again until it no
    longer grows.

    `workspace_bytes`: of cuBLAS, for each of the two threads.
    """
    trace = loop.trace
    allocator = CachingAllocator(expandable=expandable,
                                 first_made=takes_first_made(__version__))
    sizes = [block.size_bytes for block in trace.blocks]
    held: dict[int, Handle] = {}
    seen = 0
    for event in _first_products(loop) if workspace_bytes else ():
        replay(sizes, trace.events[seen:event], allocator, held)
        allocator.allocate(workspace_bytes)
        seen = event
    replay(sizes, trace.events[seen:], allocator, held)
    second = [event for span in loop.spans if span.iteration == 2
              for event in trace.events[span.start:span.stop]]
    if _leaves_nothing(second):
        for _ in range(_MOST_STEPS - 2):
            before = allocator.reserved_bytes
            replay(sizes, second, allocator, held)
            if allocator.reserved_bytes == before:
                break
    return allocator.reserved_bytes


def _first_products(loop: LoopTrace) -> list[int]:
    """Number of events before the first matrix product, in the forward and in the backward."""
    found: dict[StepPhase, int] = {}
    products = (run.event for run in loop.trace.runs if run.op in _MATRIX_PRODUCTS)
    spans = iter(loop.spans)
    span = next(spans)
    for event in products:
        while event >= span.stop:
            span = next(spans)
        if span.phase in (StepPhase.FORWARD, StepPhase.BACKWARD):
            found.setdefault(span.phase, event)
        if len(found) == 2:
            break
    return sorted(found.values())


def _leaves_nothing(events: Sequence[int]) -> bool:
    """True if exactly the allocated blocks are released, so that the events can be repeated."""
    return {event for event in events if event >= 0} == {~event for event in events if event < 0}


@dataclass(frozen=True, slots=True, eq=False)
class StepSurroundings:
    """A training loop without its forward and backward, and the allocator's settings."""

    resident: tuple[Block, ...]
    parameters: frozenset[str]
    """Names of the model's parameters."""
    optimizer: OptimizerTrace | None
    loop: TrainingLoop
    workspace_bytes: int
    """Workspace of cuBLAS per thread."""
    expandable: bool
    plain: MicroBatches | None
    """Forward and backward of the plain step; `None` if they were not traced."""

    @classmethod
    def of(cls, step: CapturedStep, accumulation: int) -> StepSurroundings | None:
        """The surroundings of a captured step; `None` if reserved memory cannot be predicted: on a
        CPU, which has no such allocator, for code generated by Inductor, and if gradients of shards
        accumulate."""
        if not step.graph.device.startswith("cuda") or step.variants[0].kernels is not None:
            return None
        if accumulation > 1 and step.tracing.layout is not None:
            return None
        first, later = step.baseline.blocks, step.later and step.later.blocks

        def plain(with_gradient: frozenset[str]) -> MicroBatch:
            return later if with_gradient and later else first

        is_followed = accumulation == 1 or later is not None
        return cls(
            step.resident_blocks(), frozenset(step.tracing.fake_copy.parameters),
            step.optimizer_steps,
            TrainingLoop(accumulation, hold_output="step" if accumulation == 1 else "backward"),
            step.held_workspace_bytes, expandable_segments(), plain if is_followed else None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the prediction of reserved memory."""
        return (() if not self.expandable else
                ("what is reserved is predicted with expandable segments, which the environment "
                 "asks for",))

    def reserved_bytes(self, micro_batches: MicroBatches) -> int:
        """Reserved memory of the loop with these forwards and backwards."""
        loop = compose(self.resident, micro_batches, self.optimizer, self.loop)
        return reserved_by(loop, self.workspace_bytes, expandable=self.expandable)

    def planned(self, graph: TrainingGraph, timeline: Timeline) -> MicroBatches:
        """Forward and backward under a schedule."""
        return lambda with_gradient: planned_micro_batch(graph, timeline, self.parameters,
                                                         with_gradient)
