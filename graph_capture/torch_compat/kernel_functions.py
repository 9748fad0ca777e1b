"""Inductor's C++ backend: which kernels become one function of the generated code.

Imported only where a step is planned for or run by Inductor, as `inductor`.

All kernels between two calls of a library become one function, whether they have to do with each
other or not.  What any of them makes is allocated before the function, and what any of them reads
is let go of after it.  So an image that is copied for the convolution behind a block of ConvNeXt
was there beside all that the gradient of the block is made of.

The most that the kernels take one by one (`kernel_memory`) is no function to exceed: where one
would, it ends before the kernel that is too much, and another one begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from graph_capture.torch_compat.requirements import require

require(__name__)

from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.scheduler import NopKernelSchedulerNode

from graph_capture.torch_compat.kernel_memory import KernelMemory, is_call


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
            last_of[scheduler] = frozenset(_last_of_functions(scheduler, is_whole()))
        return bool(ready(backend)) or scheduler.current_node.get_name() in last_of[scheduler]

    with mock.patch.object(CppScheduling, "ready_to_flush", ready_to_flush):
        yield


def _last_of_functions(scheduler: Any, is_whole: bool) -> Iterable[str]:
    """Names of the kernels after which a function is to end."""
    memory = KernelMemory(scheduler)
    changes = memory.changes(scheduler.nodes)
    limit = max(memory.levels(changes), default=0) if is_whole else 0
    # What is alive where the function begins, and what it has made and will let go of so far.
    alive, made_in, freed_in, last = memory.given_bytes, 0, 0, ""
    for node, (made, freed) in zip(scheduler.nodes, changes, strict=True):
        if is_call(node):
            alive += made_in - freed_in + made - freed
            made_in, freed_in, last = 0, 0, ""
            continue
        if last and made and alive + made_in + made > limit:
            yield last
            alive, made_in, freed_in = alive + made_in - freed_in, 0, 0
        made_in, freed_in = made_in + made, freed_in + freed
        if not isinstance(node, NopKernelSchedulerNode):  # of which there is no code
            last = node.get_name()
