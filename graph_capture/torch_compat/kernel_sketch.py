"""Kernels for CPUs without their loops: only their reads and writes.

Imported only if a step is planned for or run by Inductor, as `inductor`.

The model of the world: the names that its nodes load and store determine which buffers a kernel
reads, makes, overwrites and keeps local.  So only these are passed to the kernel, and the
arithmetic between them, most of the time of code generation, is left out.

Blind spots: nodes that search in buckets are generated as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from planner._graph_capture.torch_compat.requirements import require

require(__name__)

_ADDED = "atomic_add"
"""The mode of a store that leaves the value unknown."""


@contextlib.contextmanager
def sketched_kernels() -> Iterator[None]:
    """Inside, kernels for CPUs are sketched.

    The scalar loops come first in any case, and decide what a kernel allocates and reuses.  The
    vectorization matters only where kernels share their outer loops.
    """
    from torch._inductor.codegen.cpp import CppScheduling, OuterLoopFusedSchedulerNode, TilingSelect
    from torch._inductor.scheduler import SchedulerNode

    generate, generate_loops = CppScheduling.codegen_node, SchedulerNode.codegen

    def scalar_loops(scheduling: Any, node: Any) -> None:
        if isinstance(node, OuterLoopFusedSchedulerNode):
            generate(scheduling, node)
            return
        with mock.patch.object(TilingSelect, "_select_tiling_indices", lambda *args: []):
            generate(scheduling, node)

    def loads_and_stores(node: Any, index_vars: Any) -> None:
        if not _told(node):
            generate_loops(node, index_vars)

    with (mock.patch.object(CppScheduling, "codegen_node", scalar_loops),
          mock.patch.object(SchedulerNode, "codegen", loads_and_stores)):
        yield


def _told(node: Any) -> bool:
    """Pass the loads and stores of a node to the kernel that is being generated; false if the node
    does more."""
    from torch._inductor.loop_body import MemoryUsageType as Use
    from torch._inductor.virtualized import V

    usage = node._body.memory_usage
    stores = [*usage[Use.STORE], *usage[Use.STORE_REDUCTION]]
    if usage[Use.BUCKETIZE] or any(entry.mode not in (None, _ADDED) for entry in stores):
        return False
    kernel, context = V.kernel, V.local_buffer_context
    local = getattr(context, "global_to_local", {})
    known = kernel.cse.store_cache

    def name_in_kernel(name: str) -> str:
        return local[name].get_name() if name in local else name

    for entry in (*usage[Use.LOAD], *usage[Use.LOAD_SEED]):
        name = name_in_kernel(entry.buffer_name)
        if name not in known:
            kernel.args.input(name)
    for entry in stores:
        name = name_in_kernel(entry.buffer_name)
        kernel.store_buffer_names.add(name)
        if entry.mode != _ADDED:
            known[name] = kernel.cse.newvar(dtype=V.graph.get_dtype(name))
            if name in V.graph.name_to_buffer:
                known.update(dict.fromkeys(node.get_output(name).get_mutations(), known[name]))
        if name not in V.graph.removed_buffers:
            kernel.args.output(name)
    return True
