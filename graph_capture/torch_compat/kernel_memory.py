"""Inductor's scheduler: the memory of a graph's kernels, run one by one.

Imported only if a step is planned for or run by Inductor, as `inductor`.

The model of the world: kernels run in the given order; each makes its results and then frees the
buffers that it reads last.  A result may overwrite a buffer of its size that is read last for it,
not for another result of the same kernel.  Values read only by the kernel that makes them are never
in memory.

Blind spots: workspace of library calls; results that cannot overwrite others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, cached_property
from typing import Any, NamedTuple

from planner._graph_capture.torch_compat.requirements import require

require(__name__)

from torch._inductor import ir
from torch._inductor.utils import get_dtype_size
from torch._inductor.virtualized import V

_OF_CALLER = "primals"
"""Prefix of the names of a backward's inputs that its caller keeps alive anyway."""


class Change(NamedTuple):
    """Bytes that a kernel allocates, and bytes freed after it, without reused buffers."""

    made: int
    freed: int


class KernelMemory:
    """The memory of the kernels of one graph, in any order and however they are fused."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._given = {name: _size_bytes(node) for name, node in _handed_over().items()}
        self._used = cache(self._used_by)

    @cached_property
    def given_bytes(self) -> int:
        """Bytes alive before the first kernel, without what the caller keeps alive anyway."""
        return sum(self._given.values())

    @cached_property
    def _made(self) -> dict[str, int]:
        """Sizes of all buffers that are allocated."""
        return {name: _size_bytes(buffer.node)
                for name, buffer in self._scheduler.name_to_buf.items()
                if _is_allocated(buffer.node)}

    @cached_property
    def _freed(self) -> dict[str, int]:
        """Sizes of all buffers that are freed after their last read."""
        buffers = self._scheduler.name_to_buf
        return self._given | {name: size for name, size in self._made.items()
                              if buffers[name].can_free()}

    def changes(self, nodes: Sequence[Any]) -> list[Change]:
        """Bytes that each of the scheduler's nodes allocates and frees."""
        return [self._change(node, last) for node, last in zip(
            nodes, self.last_used(nodes), strict=True)]

    def last_used(self, nodes: Sequence[Any]) -> list[frozenset[str]]:
        """For each node, the buffers that no later one uses."""
        later: set[str] = set(V.graph.get_output_names())
        found = []
        for node in reversed(nodes):
            found.append(self._used(node) - later)
            later |= found[-1]
        return found[::-1]

    def levels(self, changes: Iterable[Change]) -> list[int]:
        """Bytes alive while each node runs, with these changes one after the other."""
        return list(_levels(self.given_bytes, changes))

    def _used_by(self, node: Any) -> frozenset[str]:
        renamed = self._scheduler.mutation_real_name
        return frozenset(renamed.get(name, name) for name in node.used_or_aliased_buffer_names())

    def _change(self, node: Any, last: Set[str]) -> Change:
        is_kernel = not is_call(node)
        members = node.get_nodes() if is_kernel else [node]
        inside = last & node.get_buffer_names() if is_kernel else set()
        left = last - inside  # and not used by later members
        total = Change(0, 0)
        for member in reversed(members):
            made = _sizes(self._made, member.get_buffer_names() - inside)
            freed = _sizes(self._freed, left & self._used(member))
            left = left - self._used(member)
            if is_kernel:
                made, freed = made - freed, freed - made
            total = Change(total.made + _total(made), total.freed + _total(freed))
        return total


def is_call(node: Any) -> bool:
    """True if a node of the scheduler is a call of a library, not a kernel of generated code."""
    return bool(node.is_extern() or node.is_template())


def _levels(alive: int, changes: Iterable[Change]) -> Iterator[int]:
    for made, freed in changes:
        yield alive + made
        alive += made - freed


def _sizes(known: Mapping[str, int], names: Iterable[str]) -> Counter[int]:
    """Number of known buffers of each size."""
    return Counter(known[name] for name in names if name in known)


def _total(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())


def _handed_over() -> dict[str, Any]:
    """Inputs that are freed when the code drops them: saved tensors and incoming gradients."""
    if not V.graph.is_backward:
        return {}
    return {name: node for name, node in V.graph.graph_inputs_original.items()
            if not name.startswith(_OF_CALLER) and _is_tensor(node)}


def _is_allocated(buffer: Any) -> bool:
    """True for a buffer that leaves its kernel and aliases no other one."""
    return bool(buffer is not None and buffer.get_name() not in V.graph.removed_buffers
                and _is_tensor(buffer) and not buffer.get_inputs_that_alias_output()
                and not buffer.get_mutation_names())


def _is_tensor(node: Any) -> bool:
    """True for one tensor; not for several, none or a number."""
    return isinstance(node, ir.IRNode) and bool(node.has_tensor_output())


def _size_bytes(node: Any) -> int:
    elements = V.graph.sizevars.optimization_hint(
        V.graph.get_allocation_storage_size(node), fallback=0)
    return int(elements) * get_dtype_size(node.get_dtype())
