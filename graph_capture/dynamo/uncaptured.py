"""The memory of code that runs between captured regions, and of the storages it keeps alive.

Where torch.compile breaks a model, the code in between runs as it is written: it makes tensors,
saves some for its own backward, and keeps Python variables alive.  No plan changes that, but the
budget must include it.  So the recorded step runs once more, with stub graphs for its regions,
while the storages made outside them are traced.

The model of the world: the regions, and the buffers that a wrapper of the model makes, cut the step
into *gaps*.  A storage of uncaptured code lives from the gap in which it is made to the gap, or the
region, in which it is released.  Storages that live only within one gap are that gap's workspace.

Blind spots: those of `memory.tracker`; copies of a region's own inputs and outputs in AOTAutograd's
wrappers (for aliased outputs) count as part of the region.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.memory.tracker import MemoryTracker, Workspace
from planner._graph_capture.torch_compat import pytree, storage_key, written_tensors
from planner._graph_capture.training_graph import Category


@dataclass(frozen=True, slots=True)
class UncapturedBuffer:
    """A storage of uncaptured code that outlived its gap or that a region read."""

    size_bytes: int
    made: int
    """Number of the gap in which it was made."""
    released: int | None
    """Number of the last gap in which it was alive; `None`: alive at the end of the step."""
    parameter: str = ""
    """Name of the parameter whose gradient it is; empty if it is none."""
    kind: Category | None = None
    """Kind that a wrapper assigned to it."""


@dataclass(frozen=True)
class UncapturedCode:
    """The memory of a step between its regions, by gap; gaps are numbered in order of time."""

    storages: tuple[UncapturedBuffer, ...]
    workspace_bytes: tuple[int, ...]
    """For each gap, the largest memory in addition to `storages`."""
    before_forward: Mapping[int, int]
    """Number of a call -> the last gap before its forward."""
    last_of_loss: int
    """The gap in which the loss is computed; the backward starts with the next."""
    before_backward: Mapping[int, int]
    """Number of a call -> the last gap before its backward."""
    inputs: Mapping[tuple[int, int], int]
    """(call, index of a primal) -> index of its storage."""
    cotangents: Mapping[tuple[int, int], int]
    """(call, index of a cotangent) -> index of its storage."""
    outputs_released: Mapping[tuple[int, int], int | None]
    """(call, position of an output) -> the last gap in which it was alive."""
    gradients_released: Mapping[tuple[int, int], int]
    """(call, index of a primal) -> the last gap in which its gradient was alive, unless it lived to
    the end of the step."""
    written: frozenset[tuple[int, int]] = frozenset()
    """(call, index of a primal) that other code writes between forward and backward of the call."""

    def makes_nothing_after(self, call: int) -> bool:
        """True if no code between the forward of a call and the backward makes a tensor."""
        gaps = range(self.before_forward[call] + 1, self.last_of_loss + 1)
        return not (any(storage.made in gaps for storage in self.storages)
                    or any(self.workspace_bytes[gap] for gap in gaps))


class GapTracker(MemoryTracker):
    """Tracks the storages made between regions while a recorded step runs again."""

    def __init__(self, fake_copy: FakeCopy, workspace: Workspace) -> None:
        super().__init__(workspace, device=fake_copy.device, trace_device=fake_copy.trace_device,
                         resident=fake_copy.fake_of.values())
        self._paused = False
        self._gap = 0
        self._has_made = False  # in this gap
        self._made: dict[int, int] = {}  # number of a storage -> gap
        self._gone: dict[int, int] = {}
        self._peaks: list[int] = []  # by gap
        self.calls = 0
        """Number of region forwards that have begun."""
        self._before_forward: dict[int, int] = {}
        self._last_of_loss = 0
        self._before_backward: dict[int, int] = {}
        self._inputs: dict[tuple[int, int], int] = {}
        self._cotangents: dict[tuple[int, int], int] = {}
        self._outputs: dict[tuple[int, int], int | None] = {}
        self._gradients: dict[tuple[int, int], int | None] = {}
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []
        self._readers: dict[int, list[tuple[weakref.ref[torch.UntypedStorage], int, int]]] = {}
        # key of a storage, which may be reused -> calls and their primals
        self._written = set[tuple[int, int]]()
        self.read = set[int]()
        """Keys of the storages that ops have read; a key may be reused."""

    @property
    def made_any(self) -> bool:
        """True if uncaptured code has made a storage so far."""
        return bool(self._made)

    def begin_forward(self, inputs: Sequence[object]) -> int:
        """Begin a region's forward; returns the number of the call."""
        call, self.calls = self.calls, self.calls + 1
        self._before_forward[call] = self._gap
        self._link(self._inputs, call, inputs)
        for position, tensor in enumerate(inputs):
            if isinstance(tensor, torch.Tensor):
                self._readers.setdefault(storage_key(tensor), []).append(
                    (weakref.ref(tensor.untyped_storage()), call, position))
        self._paused = True
        return call

    def begin_backward(self, call: int, cotangents: Sequence[object]) -> None:
        """Begin the backward of a call."""
        self._before_backward[call] = self._gap
        self._link(self._cotangents, call, cotangents)
        self._paused = True

    def end_region(self) -> None:
        """End a region and begin the next gap.  Storages that the region released count as alive
        until just before it."""
        self._paused = False
        self._next_gap()

    def watch_outputs(self, call: int, outputs: Sequence[object]) -> None:
        """Record when the outputs of a call are released."""
        self._watch(self._outputs, call, outputs)

    def watch_gradients(self, call: int, gradients: Sequence[object]) -> None:
        """Record when the gradients that the backward of a call returned are released.

        Where a parameter is used twice, its gradients are released one by one as they are summed;
        a gap ends with each, so that they do not all count beside all sums.
        """
        self._watch(self._gradients, call, gradients, ends_gap=True)

    def make_buffer(self, size_bytes: int, kind: Category) -> torch.Tensor:
        """Allocate a buffer of a wrapper; a new gap begins with it."""
        self._next_gap()
        return super().make_buffer(size_bytes, kind)

    def start_of_backward(self) -> int:
        """End the gap of the loss."""
        self._last_of_loss = self._gap
        self._next_gap()
        return super().start_of_backward()

    def finish(self, gradients: Mapping[str, torch.Tensor]) -> UncapturedCode:
        """End the tracking and return its result; `gradients`: those of the parameters, by name."""
        self.close()
        self._next_gap()
        labels = {self.number_of(gradient): name for name, gradient in gradients.items()}
        read_by_regions = {*self._inputs.values(), *self._cotangents.values()}
        lasting = [number for number, made in self._made.items()
                   if self._gone.get(number) != made or number in read_by_regions]
        index_of = {number: index for index, number in enumerate(lasting)}
        storages = tuple(UncapturedBuffer(self._sizes[number], self._made[number],
                                          self._gone.get(number), labels.get(number, ""),
                                          self.kind_of.get(number))
                         for number in lasting)
        workspace = []
        for gap, peak in enumerate(self._peaks):
            held = sum(s.size_bytes for s in storages
                       if s.made <= gap and (s.released is None or s.released >= gap))
            workspace.append(max(0, peak - held))

        def by_index(links: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
            return {key: index_of[number] for key, number in links.items()}

        return UncapturedCode(
            storages, tuple(workspace), dict(self._before_forward), self._last_of_loss,
            dict(self._before_backward), by_index(self._inputs), by_index(self._cotangents),
            dict(self._outputs),
            {key: gap for key, gap in self._gradients.items() if gap is not None},
            frozenset(self._written))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        self.read.update(storage_key(leaf) for leaf in pytree.tree_leaves((args, kwargs or {}))
                         if isinstance(leaf, torch.Tensor))
        for tensor in written_tensors(func, args, kwargs or {}):
            self._written |= {
                (call, position) for storage, call, position
                in self._readers.get(storage_key(tensor), ())
                if storage() is not None and call not in self._before_backward}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _next_gap(self) -> None:
        self._peaks.append(self.peak_bytes)
        self._gap += 1
        self._has_made = False
        self.restart_peak()

    def _link(self, links: dict[tuple[int, int], int], call: int,
              tensors: Sequence[object]) -> None:
        for position, tensor in enumerate(tensors):
            number = self.number_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if number is not None and self._sizes[number]:  # an empty selection needs no memory
                links[call, position] = number

    def _change(self, number: int, change: int) -> None:
        super()._change(number, change)
        self._has_made |= change > 0
        (self._made if change > 0 else self._gone)[number] = self._gap

    def _watch(self, last_gap: dict[tuple[int, int], int | None], call: int,
               tensors: Sequence[object], *, ends_gap: bool = False) -> None:
        def gone(key: tuple[int, int], _: object) -> None:
            if self.is_closed:
                return
            last_gap[key] = self._gap
            if ends_gap and self._has_made and not self._paused:
                self._next_gap()

        for position, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor):
                last_gap[call, position] = None
                self._watched.append(weakref.ref(
                    tensor.untyped_storage(), functools.partial(gone, (call, position))))
