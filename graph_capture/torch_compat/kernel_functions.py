"""Inductor's C++ backend: which kernels become one function of the generated code.

Imported only where a step is planned for or run by Inductor, as `inductor`.

All kernels between two calls of a library become one function, whether they have to do with each
other or not.  What any of them makes is allocated before the function, and what any of them reads
is let go of after it.  So an image that is copied for the convolution behind a block of ConvNeXt
was there beside all that the gradient of the block is made of.

The model of the world: kernels run in the scheduler's order, each makes its results and lets go of
what it reads last; a result may take the place of something of its size that is read last.  The
most that this takes, kernel by kernel, is no function to exceed: where one would, it ends before
the kernel that is too much, and another one begins.

Blind spots: what library calls take for themselves; results that cannot take the place of others.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from graph_capture.torch_compat.requirements import require

require(__name__)

from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.scheduler import NopKernelSchedulerNode

from graph_capture.torch_compat.generated_buffers import (
    handed_over,
    has_memory_of_its_own,
    size_bytes,
)


@contextlib.contextmanager
def functions_below_peak(is_whole: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside, no function of the C++ code that Inductor generates takes more memory than the most
    that the kernels of its graph take one by one.  Where `is_whole` says that a graph lacks some
    layers, its peak may lie elsewhere, and each kernel is a function."""
    ready = CppScheduling.ready_to_flush
    last_of: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()

    def ready_to_flush(backend: Any) -> bool:
        scheduler = backend.scheduler
        if scheduler not in last_of:
            last_of[scheduler] = frozenset(_last_of_functions(scheduler.nodes, is_whole()))
        return bool(ready(backend)) or scheduler.current_node.get_name() in last_of[scheduler]

    with mock.patch.object(CppScheduling, "ready_to_flush", ready_to_flush):
        yield


def _last_of_functions(nodes: Sequence[Any], is_whole: bool) -> Iterable[str]:
    """Names of the kernels after which a function is to end."""
    given = {name: size_bytes(node) for name, node in handed_over().items()}
    changes = [_changes(node, given) for node in nodes]
    alive, most = sum(given.values()), 0
    for made, freed in changes:
        most = max(most, alive + made)
        alive += made - freed
    limit = most if is_whole else 0
    # What is alive where the function begins, and what it has made and will let go of so far.
    alive, made_in, freed_in, last = sum(given.values()), 0, 0, ""
    for node, (made, freed) in zip(nodes, changes, strict=True):
        if _is_call(node):
            alive += made_in - freed_in + made - freed
            made_in, freed_in, last = 0, 0, ""
            continue
        if last and made and alive + made_in + made > limit:
            yield last
            alive, made_in, freed_in = alive + made_in - freed_in, 0, 0
        made_in, freed_in = made_in + made, freed_in + freed
        if not isinstance(node, NopKernelSchedulerNode):  # of which there is no code
            last = node.get_name()


def _is_call(node: Any) -> bool:
    """Whether a node of the scheduler is no kernel of the C++ code, which ends a function."""
    return bool(node.is_extern() or node.is_template())


def _changes(node: Any, given: dict[str, int]) -> tuple[int, int]:
    """Bytes that a node of the scheduler makes, and bytes that are let go of behind it, without
    those that change hands."""
    made = Counter(size_bytes(buffer.node) for buffer in node.get_outputs()
                   if has_memory_of_its_own(buffer.node))
    freed: Counter[int] = Counter()
    buffers = node.scheduler.name_to_buf
    for name in node.last_usage:
        if name in given:
            freed[given[name]] += 1
        elif name in buffers and buffers[name].can_free() and has_memory_of_its_own(
                buffers[name].node):
            freed[size_bytes(buffers[name].node)] += 1
    if not _is_call(node):
        made, freed = made - freed, freed - made
    return _total(made), _total(freed)


def _total(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())
