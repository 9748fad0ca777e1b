"""The memory of a real step on a CPU, watched from its first call to the step of its optimizer.

The model of the world: what was there when the watch began is given; from then on each op of
PyTorch that runs on the calling thread is seen, and each storage to its release.  A tensor that an
op reads without having been seen was there before, and counts from then on.

Blind spots: memory that a kernel uses while it runs, that of compiled code (Inductor) between its
inputs and outputs, other threads, and libraries that allocate without PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from planner._graph_capture.fake_copies.storage_less import is_storage_less
from planner._graph_capture.memory.tracker import MemoryTracker
from planner._graph_capture.torch_compat import (
    OpOverload,
    active_modes,
    runs_its_own_ops,
    storage_key,
)

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class StepWatch(MemoryTracker):
    """Follows a real step; a dispatch mode that its owner enters with `begin`, leaves with `end`.
    """

    def __init__(self, device: torch.device, held: Iterable[torch.Tensor],
                 earlier: StepWatch | None = None) -> None:
        """`held`: tensors that are there now; `earlier`: a watch that knows of others."""
        super().__init__(lambda *_: 0, device=device, trace_device=device, resident=())
        self.phase = ""
        """The current phase of the step, in words."""
        self.peak_phase = ""
        """The phase at the peak."""
        self.op_count = 0
        """Ops seen."""
        self.device = device
        for tensor in held:
            self._meet(tensor)
        if earlier is not None:
            self._follow_all(earlier)
        self.begin_bytes = self.live_bytes
        """Memory when the watch began."""

    def _follow_all(self, earlier: StepWatch) -> None:
        for key, number in earlier._number_of.items():
            storage = earlier._references[number]()
            if storage is not None and key not in self._number_of:
                self._follow_storage(key, storage)

    def bytes_beside(self, tensors: Iterable[torch.Tensor]) -> int:
        """Memory now, but for these tensors."""
        numbers = {self._number_of.get(storage_key(tensor)) for tensor in tensors}
        return self.live_bytes - sum(
            self._sizes[number] for number in numbers if number is not None)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo runs its compiled code under such a mode, and gives up under any other."""
        return True

    def begin(self) -> bool:
        """Watch from here on; return whether that is possible here and now."""
        if not all(isinstance(mode, MemoryTracker) for mode in active_modes()):
            return False
        self.__enter__()
        return True

    def end(self) -> None:
        """Watch no longer."""
        self.close()
        self.leave()

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if runs_its_own_ops(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.op_count += 1
        if not self._closed and isinstance(func, OpOverload) and not func.is_view:
            self._meet(args)
            self._meet(out)
        return out

    def _meet(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            # A sparse tensor has no storage; its indices and values were met when they were made.
            if (type(value) in _PLAIN and value.device.type == self.device.type
                    and value.layout is torch.strided
                    and storage_key(value) not in self._number_of
                    and not is_storage_less(value)):
                self._follow(value)
        elif isinstance(value, tuple | list):
            for each in value:
                self._meet(each)

    def _released(self, key: int, number: int) -> None:
        if self._number_of.get(key) == number:  # else another storage is there now
            super()._released(key, number)

    def _change(self, number: int, change: int) -> None:
        before = self.peak_bytes
        super()._change(number, change)
        if self.peak_bytes > before:
            self.peak_phase = self.phase
