"""Inductor's generated code: which buffers it keeps for later ones of their size.

Imported only where a step is planned for or run by Inductor, as `inductor`.

A buffer that is kept spares the operating system to take its pages back and to hand out others,
page by page, which a U-Net with feature maps of 33 MB spends a tenth of its step on.  But it takes
memory from its last use to the next one.  Inductor keeps it where its own estimate of the peak
allows that, which is above what the code takes: under a plan by a tenth, which the kept buffers
then take.

The model of the world: the lines of the generated code, each with what it allocates and lets go,
say how much is alive after each.  A buffer is kept where that, with the buffer itself, is at no
line between more than the most without any that is kept.  Where a library's kernel runs between,
it may take as much for itself as its operands hold.

Blind spots: a library's kernel that takes more; where graphs lie within graphs (loops, conditions)
a buffer is kept from one kernel to the next alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from graph_capture.torch_compat.requirements import require

require(__name__)

import torch
from torch._inductor.codegen import wrapper
from torch._inductor.virtualized import V

from graph_capture.torch_compat.generated_buffers import (
    handed_over,
    has_memory_of_its_own,
    is_tensor,
    size_bytes,
)


@contextlib.contextmanager
def buffers_kept_below_peak(is_whole: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside, the code that Inductor generates keeps a buffer only where it takes no more memory at
    its peak for that.  Where `is_whole` says that a graph lacks some layers, its peak may lie
    elsewhere, and buffers are kept from one kernel to the next alone."""
    with mock.patch.object(wrapper, "EfficientPeakEstimate",
                           lambda: _PeakOfLines(V.graph.wrapper_code.lines if is_whole() else ())):
        yield


class _PeakOfLines:
    """In the place of Inductor's estimate: lines instead of kernels."""

    def __init__(self, lines: Sequence[Any]) -> None:
        self._lines = tuple(lines)  # planning replaces them one by one
        self._place_of = {id(line): place for place, line in enumerate(self._lines)}
        alive = _alive_after(self._lines)
        self.overall_peak_memory = max(alive, default=0)
        self._taken = [size + _workspace_bytes(line)
                       for size, line in zip(alive, self._lines, strict=True)]

    def peak_between(self, freed: Any, allocated: Any) -> float:
        """The most that is taken from one line to another; infinite where that is not known."""
        return max(self._taken[self._between(freed, allocated)], default=math.inf)

    def update_peak_between(self, freed: Any, allocated: Any) -> None:
        """Count the buffer that the first line would free, and that the second one takes over."""
        between = self._between(freed, allocated)
        size = size_bytes(allocated.node)
        self._taken[between] = [taken + size for taken in self._taken[between]]

    def _between(self, freed: Any, allocated: Any) -> slice:
        first, last = (self._place_of.get(id(line)) for line in (freed, allocated))
        return slice(0, 0) if first is None or last is None else slice(first, last)


def _alive_after(lines: Sequence[Any]) -> list[int]:
    """Bytes alive after each line, beside what the caller holds."""
    sizes = {name: size_bytes(node) for name, node in handed_over().items()}
    total, alive = sum(sizes.values()), []
    for line in lines:
        if isinstance(line, wrapper.ReuseLine):  # one buffer goes on under another name
            sizes[line.reused_as.get_name()] = sizes.pop(line.node.get_name(), 0)
        elif isinstance(line, wrapper.FreeIfNotReusedLine | wrapper.FreeLine):
            total -= sizes.pop(line.node.get_name(), 0)
        elif (made := _made_by(line)) is not None:
            sizes[made.get_name()] = size_bytes(made)
            total += sizes[made.get_name()]
        alive.append(total)
    return alive


def _made_by(line: Any) -> Any:
    """The buffer with memory of its own that a line makes; `None` if it makes none."""
    made: Any
    if isinstance(line, wrapper.AllocateLine | wrapper.ExternKernelAllocLine):
        made = line.node
    elif isinstance(line, wrapper.MultiOutputLine):
        made = V.graph.try_get_buffer(line.result_name)
    else:
        return None
    return made if has_memory_of_its_own(made) else None


def _workspace_bytes(line: Any) -> float:
    """Upper bound on a library kernel's workspace: copies of its operands; for the gradients of a
    convolution by groups, whose channels are padded to blocks, no limit is known."""
    if not isinstance(line, wrapper.ExternKernelAllocLine):
        return 0
    operands: list[Any] = [operand for operand in line.node.inputs if is_tensor(operand)]
    if line.node.op_overload is torch.ops.aten.convolution_backward.default:
        _, image, weight = (operand.get_size() for operand in operands[:3])
        if image[1] != weight[1]:
            return math.inf
    return sum(map(size_bytes, operands))
