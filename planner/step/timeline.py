"""Memory over the course of a step, for drawing: under a schedule, and as the step runs today.

Moments are runs of ops, recomputations included; of a step that Inductor compiles, each allocation
and each release.  They are not of equal duration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner._graph_capture.training_graph import BufferKind
from planner.step.categories import MemoryByCategory


@dataclass(frozen=True, slots=True)
class PlainTimeline:
    """The plain step, moment after moment."""

    whole_bytes: tuple[int, ...]
    """All memory of the step, resident memory included."""
    backward_begins: int
    """The first moment of the backward."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Forward, loss and backward under a plan, moment after moment."""

    gradients: tuple[int, ...]
    """Bytes, those of earlier micro-batches included."""
    activations: tuple[int, ...]
    temporaries: tuple[int, ...]
    """Parameters that are gathered for a while among them."""
    backward_begins: int
    """The first moment of the backward."""
    plain: PlainTimeline
    """The step as it runs today."""

    @classmethod
    def of(cls, made: Mapping[BufferKind, Sequence[int]], backward_begins: int,
           resident: MemoryByCategory, plain: PlainTimeline) -> StepTimeline:
        """From what forward and backward make, by kind, and what is there before them."""
        return cls(tuple(resident.gradients + size for size in made[BufferKind.GRADIENT]),
                   tuple(resident.activations + size for size in made[BufferKind.ACTIVATION]),
                   tuple(map(sum, zip(made[BufferKind.TEMPORARY], made[BufferKind.PARAMETER],
                                      strict=True))),
                   backward_begins, plain)
