"""Bytes by category: dataclasses that are also mappings from field to bytes, and timelines of them.

Positions of a step's timeline are runs of ops, including recomputations; for a step that Inductor
compiles, each allocation and each release.  They have unequal durations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from planner._graph_capture.training_graph import Category


@dataclass(frozen=True, slots=True, eq=False)
class MemoryByCategory(Mapping[str, int]):
    """A mapping from category to bytes, in a fixed order; the categories sum to the peak."""

    parameters: int = 0
    buffers: int = 0
    inputs: int = 0
    gradients: int = 0
    optimizer: int = 0
    """State of the optimizer; the temporaries of its step are temporaries."""
    activations: int = 0
    """Results of the forward, and state for their recomputation (of the random generator)."""
    temporaries: int = 0
    """Gradients of activations, workspace of single ops, temporaries of the optimizer's step."""

    def __getitem__(self, category: str) -> int:
        if category not in tuple(self):
            raise KeyError(category)
        size_bytes: int = getattr(self, category)
        return size_bytes

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __hash__(self) -> int:
        return hash(tuple(self.values()))

    @property
    def total_bytes(self) -> int:
        """The sum over all categories."""
        return sum(self.values())


CATEGORIES = tuple(field.name for field in fields(MemoryByCategory))
"""The categories of memory, in the order in which reports list them."""


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
    def of(cls, made: Mapping[Category, Sequence[int]], backward_begins: int,
           resident: MemoryByCategory, plain: PlainTimeline) -> StepTimeline:
        """Build from the bytes of forward and backward, by kind, and resident memory."""
        return cls(tuple(resident.gradients + size for size in made[Category.GRADIENTS]),
                   tuple(resident.activations + size for size in made[Category.ACTIVATIONS]),
                   tuple(map(sum, zip(made[Category.TEMPORARIES], made[Category.PARAMETERS],
                                      strict=True))),
                   backward_begins, plain)
