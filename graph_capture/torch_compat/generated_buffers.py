"""Inductor's generated code: the buffers of the graph that code is being generated for.

Imported only where a step is planned for or run by Inductor, as `inductor`.
"""

from __future__ import annotations

from typing import Any

from graph_capture.torch_compat.requirements import require

require(__name__)

from torch._inductor import ir
from torch._inductor.utils import get_dtype_size
from torch._inductor.virtualized import V

_OF_CALLER = "primals"
"""Prefixes of those inputs of a backward that its caller keeps alive anyway."""


def handed_over() -> dict[str, Any]:
    """Inputs that are freed when the code releases them: saved tensors of the forward, and the
    gradients that come in."""
    if not V.graph.is_backward:
        return {}
    return {name: node for name, node in V.graph.graph_inputs_original.items()
            if not name.startswith(_OF_CALLER) and is_tensor(node)}


def has_memory_of_its_own(buffer: Any) -> bool:
    """Return whether a buffer is allocated: it leaves its kernel and is no other one's."""
    return bool(buffer is not None and buffer.get_name() not in V.graph.removed_buffers
                and is_tensor(buffer) and not buffer.get_inputs_that_alias_output()
                and not buffer.get_mutation_names())


def is_tensor(node: Any) -> bool:
    """Return whether a node is one tensor, not several, none or a number."""
    return isinstance(node, ir.IRNode) and bool(node.has_tensor_output())


def size_bytes(node: Any) -> int:
    """Size of a buffer in bytes."""
    elements = V.graph.sizevars.optimization_hint(
        V.graph.get_allocation_storage_size(node), fallback=0)
    return int(elements) * get_dtype_size(node.get_dtype())
