"""Bytes by category: dataclasses that are also mappings from field to bytes, and timelines of
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields


class ByCategory(Mapping[str, int]):
    """Base of frozen dataclasses of byte counts: a mapping from field to bytes, in the order of the
    fields; the categories sum to the peak."""

    __slots__ = ()

    def __getitem__(self, category: str) -> int:
        if category not in tuple(self):
            raise KeyError(category)
        size_bytes: int = getattr(self, category)
        return size_bytes

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash(tuple(self.values()))


@dataclass(frozen=True, slots=True, eq=False)
class MemoryByCategory(ByCategory):
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

    @property
    def total_bytes(self) -> int:
        """The sum over all categories."""
        return sum(self.values())


CATEGORIES = tuple(field.name for field in fields(MemoryByCategory))
"""The categories of memory, in the order in which reports list them."""


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Bytes by category at each position."""

    bytes_of: tuple[tuple[int, ...], ...]
    """For each position, the bytes of each category, in the order of `CATEGORIES`."""

    @property
    def peak_bytes(self) -> int:
        """The highest total at any position."""
        return max(map(sum, self.bytes_of))

    def by_category(self) -> dict[str, list[int]]:
        """Bytes at each position, by category."""
        return {name: [row[place] for row in self.bytes_of]
                for place, name in enumerate(CATEGORIES)}
