"""A record of allocations and frees during a stretch of code, in order, with a name for every
block.

It is the only record of memory over time: the tracker of plain steps makes it, the breakdown of the
whole training step is assembled from it, and reports read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from planner._graph_capture.training_graph import Category

COMMUNICATION = "buffers of collectives"
"""Label of the temporaries of a data-parallel wrapper."""


class Block(NamedTuple):
    """A block of memory that the allocator handed out."""

    size_bytes: int
    category: Category
    op: str = ""
    """The op that made it, e.g. `aten.bmm`; empty for a block from before the trace."""
    module: str = ""
    """Qualified name of the running module; in the backward, of the one that is differentiated."""
    label: str = ""
    """Name of the tensor if it has one; the parameter's name for its gradient and its state."""


class OpRun(NamedTuple):
    """One run of an op."""

    event: int
    """Number of events before the run allocated anything."""
    op: str
    module: str


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """Blocks, and the order in which they were made and released."""

    blocks: tuple[Block, ...]
    events: tuple[int, ...]
    """`i`: block i is made; `~i`: block i is released."""
    runs: tuple[OpRun, ...] = ()
    """The ops that ran, in order."""

    def changes(self) -> Iterator[int]:
        """Bytes allocated (positive) or freed (negative) by each event."""
        for event in self.events:
            yield (self.blocks[event].size_bytes if event >= 0
                   else -self.blocks[~event].size_bytes)

    def levels(self) -> list[int]:
        """Bytes before the first event and after each, above the memory before."""
        return list(accumulate(self.changes(), initial=0))

    def levels_of(self, category: Category) -> list[int]:
        """Bytes of one category after each event."""
        return list(accumulate(
            change if self.blocks[event if event >= 0 else ~event].category is category else 0
            for event, change in zip(self.events, self.changes(), strict=True)))

    def levels_by_run(self) -> list[int]:
        """Maximum of bytes from each op's run to the next one."""
        levels = self.levels()
        starts = [*(run.event for run in self.runs), len(self.events)]
        return [max(levels[start:end + 1]) for start, end in pairwise(starts)]

    @property
    def peak_bytes(self) -> int:
        """Maximum at any time; at least 0."""
        return max(self.levels())

    def until(self, count: int) -> MemoryTrace:
        """The first `count` events."""
        return replace(self, events=self.events[:count],
                       runs=tuple(run for run in self.runs if run.event <= count))

    def alive_after(self, count: int) -> list[int]:
        """Blocks made and not released by the first `count` events, in order of making."""
        alive: dict[int, None] = {}
        for event in self.events[:count]:
            if event >= 0:
                alive[event] = None
            else:
                alive.pop(~event, None)
        return list(alive)

    def alive_at_peak(self) -> list[int]:
        """Blocks alive at the first moment of the highest memory."""
        levels = self.levels()
        return self.alive_after(levels.index(max(levels)))

    def by_category(self, blocks: Iterable[int]) -> Mapping[Category, int]:
        """Bytes of these blocks for every category."""
        found = dict.fromkeys(Category, 0)
        for block in blocks:
            found[self.blocks[block].category] += self.blocks[block].size_bytes
        return found


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Memory of one forward, loss and backward above what was allocated before."""

    trace: MemoryTrace
    """Up to the end of the backward, while the output and the loss are still alive."""
    loss_begins: int
    """Number of events when the model has returned its output."""
    backward_begins: int
    """Number of events when the loss is computed."""
    gradients: Mapping[int, str]
    """Blocks that stay as gradients of parameters, and the parameter's name.  A gradient that was
    added to an earlier one is not among them."""
    output_blocks: frozenset[int]
    """Blocks that are freed when the output is released."""
    loss_blocks: frozenset[int]
    """Blocks that are freed when, after the output, the loss is released."""
    left_blocks: frozenset[int] = frozenset()
    """Other blocks that stay, assumed to be freed with the next batch: gradients of inputs, tensors
    in attributes of the model."""
    sparse_gradients: Mapping[str, Any] = field(default_factory=dict)
    """Gradients in coordinate form, by parameter: tensors without values."""
    storage_less: bool = True
    """True if the code ran on storage-less tensors, which it takes for ordinary ones; else on fake
    ones, which some libraries treat in another way."""
    freed_gradients: frozenset[str] = frozenset()
    """Names of parameters whose gradients hooks have used and freed."""

    @property
    def with_gradient(self) -> frozenset[str]:
        """Names of the parameters that get a gradient."""
        return self.freed_gradients.union(self.gradients.values())
