"""Memory timelines of a step, for drawing: under a schedule, and of the plain step.

Positions are runs of ops, including recomputations; for a step that Inductor compiles, each
allocation and each release.  They have unequal durations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner._graph_capture.training_graph import BufferKind
from planner.step.categories import MemoryByCategory


@dataclass(frozen=True, slots=True)
class PlainTimeline:
    """Memory timeline of the plain step."""

    whole_bytes: tuple[int, ...]
    """All memory of the step, resident memory included."""
    backward_begins: int
    """First position of the backward."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Memory timeline of forward, loss and backward under a plan."""

    gradients: tuple[int, ...]
    """Bytes, including gradients of earlier micro-batches."""
    activations: tuple[int, ...]
    temporaries: tuple[int, ...]
    """Includes temporarily gathered parameters."""
    backward_begins: int
    """First position of the backward."""
    plain: PlainTimeline
    """The plain step."""

    @classmethod
    def of(cls, made: Mapping[BufferKind, Sequence[int]], backward_begins: int,
           resident: MemoryByCategory, plain: PlainTimeline) -> StepTimeline:
        """Build from the bytes of forward and backward, by kind, and resident memory."""
        return cls(tuple(resident.gradients + size for size in made[BufferKind.GRADIENT]),
                   tuple(resident.activations + size for size in made[BufferKind.ACTIVATION]),
                   tuple(map(sum, zip(made[BufferKind.TEMPORARY], made[BufferKind.PARAMETER],
                                      strict=True))),
                   backward_begins, plain)
