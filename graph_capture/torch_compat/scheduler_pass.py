"""Inductor's scheduler: the order of a plan's kernels, and kernels that are split.

Imported only if a step is planned for or run by Inductor, as `inductor`.

Both are passes over the scheduler's nodes, before and after it fuses them.  `UnfusedKernels` splits
kernels that were fused because they read the same although neither reads the other's result
(horizontal fusion), which saves a pass over the shared operands.  But then the results of both are
alive at once, where those of one might be freed before the other runs.  In the backward of
attention with dropout, this keeps the probabilities for the gradient of the values alive together
with the gradient of the scores.  Such a kernel is split only where that lowers the peak of its
graph's kernels.

The model of the world for that peak: kernels run in the given order; each makes its results and
then frees the buffers that it reads last.  A result may overwrite a buffer of its size that is read
last for it, not for another result of the same kernel.  Values read only by the kernel that makes
them are never in memory.

Blind spots: workspace of library calls; results that cannot overwrite others.  Candidates for a
split are searched at the peak in the order of the graph.  Inductor may run kernels in another order
that uses less memory; then that order decides if the found kernels stay split, but not which are
searched.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, cached_property
from itertools import islice, pairwise
from typing import Any, NamedTuple

from planner._graph_capture.torch_compat.requirements import require

require(__name__)

import torch
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass, ir
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.memory import reorder_for_peak_memory
from torch._inductor.scheduler import FusedSchedulerNode
from torch._inductor.utils import get_dtype_size
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from planner._graph_capture.torch_compat.compilation import OpOverload

# Inductor caches only with a pass of this class.
_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


class SchedulerPass(_Pass):
    """A pass over the scheduler's nodes; it runs after the user's own pass."""

    setting: str
    """Name of its setting in `torch._inductor.config`."""

    def __init__(self) -> None:
        self._of_user = getattr(inductor_config, self.setting)

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Change the scheduler's nodes, which are in the order of execution; a pass that the user
        had set runs first."""
        return self._change(self._of_user(nodes) if self._of_user else nodes)

    @abstractmethod
    def _change(self, nodes: list[Any]) -> list[Any]:
        """The nodes that replace these."""

    @property
    @abstractmethod
    def _version(self) -> tuple[object, ...]:
        """Key of the pass in the compilation caches; must change with its code."""

    def uuid(self) -> tuple[object, ...] | None:
        """Key of this pass and the user's in the compilation caches; `None`, for no caching, if the
        user's is a plain function."""
        if self._of_user is None:
            return self._version
        if not isinstance(self._of_user, _Pass):
            return None
        return (*self._version, self._of_user.uuid())


class KernelOrder(SchedulerPass):
    """Keeps the kernels of the backward in the order of the plan.

    Recomputations in the backward depend on no gradient, so Inductor may fuse them with the first
    kernel of the backward, or run them then, and all recomputed values would be alive at once.
    This pass adds an ordering dependency on the last external kernel before them that depends on a
    gradient: kernels are not fused across those anyway.

    Random kernels of either graph get one on the previous random kernel, since the numbers that a
    kernel draws depend on earlier draws.

    `strict`: every kernel gets one on the last external kernel before it, and external kernels on
    all before them.  This uses less memory still, and more time: two kernels that could be one each
    read their operands.
    """

    setting = "_pre_fusion_custom_pass"

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self._strict = strict

    @property
    def _version(self) -> tuple[object, ...]:
        return ("checkpoint-planner: order of kernels 3", self._strict)

    def _change(self, nodes: list[Any]) -> list[Any]:
        _keep_order([node for node in nodes if _is_random(node) and node.get_buffer_names()])
        if V.graph.is_backward:
            self._hold_back(nodes)
        V.graph.scheduler.compute_ancestors()
        return nodes

    def _hold_back(self, nodes: list[Any]) -> None:
        dependent = {name for name in V.graph.graph_input_names if "tangents" in name}
        barrier = ""
        since: list[str] = []  # buffers made after the barrier
        for node in nodes:
            made = node.get_buffer_names()
            depends = any(dep.name in dependent for dep in node.read_writes.reads)
            if barrier and made and (self._strict or not depends):
                _run_after(node, barrier)
            if depends:
                dependent.update(made)
            if node.is_extern() and made and (self._strict or depends):
                for buffer in since:
                    _run_after(node, buffer)
                barrier, since = next(iter(made)), []
            elif self._strict:
                since.extend(made)


def _keep_order(nodes: Sequence[Any]) -> None:
    """Make scheduler nodes run in the given order."""
    for earlier, later in pairwise(nodes):
        _run_after(later, next(iter(earlier.get_buffer_names())))


def _run_after(node: Any, buffer: str) -> None:
    # An op's name in place of a mutated buffer: the dependency is for order alone.
    node.add_fake_dep(WeakDep(buffer, node.get_name(), is_fake=True))


def _is_random(node: Any) -> bool:
    """True if a scheduler node draws from one of torch's generators."""
    op = getattr(node.node, "op_overload", None)
    return (node.is_extern() and isinstance(op, OpOverload)
            and torch.Tag.nondeterministic_seeded in op.tags)


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

    def levels(self, nodes: Sequence[Any]) -> list[int]:
        """Bytes alive while each of the scheduler's nodes runs, in this order."""
        alive, found = self.given_bytes, []
        for made, freed in self.changes(nodes):
            found.append(alive + made)
            alive += made - freed
        return found

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


_TRIES = 8
"""Maximum of kernels that are tried for one peak: the nearest."""
_WORTH = 0.005
"""Minimum share by which the peak must fall for a split."""

_BY_NODE = ("node_to_stream", "node_to_mempool")
"""Further tables of the scheduler, by node; torch 2.11 has none."""


class UnfusedKernels(SchedulerPass):
    """Splits fused kernels at the memory peak of their graph."""

    setting = "_post_fusion_custom_pass"

    @property
    def _version(self) -> tuple[object, ...]:
        return ("checkpoint-planner: kernels apart 1",)

    def _change(self, nodes: list[Any]) -> list[Any]:
        scheduler = V.graph.scheduler
        whole = found = best = _Split(scheduler, KernelMemory(scheduler), nodes)
        while (lower := _lowered(found)) is not None:
            found = lower
            if found.peak_bytes < best.peak_bytes:
                best = found
        worth = 1 - _WORTH
        if best is whole or best.peak_bytes > worth * whole.peak_bytes or (
                best.peak_bytes_as_run() > worth * whole.peak_bytes_as_run()):
            return nodes
        return best.settled()


def _lowered(split: _Split) -> _Split | None:
    """The nodes with one more kernel split, so that the peak is lower or rarer; `None` if there is
    no such kernel."""
    for node, parts in islice(_candidates(split), _TRIES):
        lower = split.with_unfused(node, parts)
        if (lower.peak_bytes, lower.peaks) < (split.peak_bytes, split.peaks):
            return lower
    return None


def _candidates(split: _Split) -> Iterator[tuple[Any, list[Any]]]:
    """Kernels that make or read a buffer alive at the peak, each with a way to split it; the
    nearest first."""
    nodes, last_used = split.nodes, split.memory.last_used(split.nodes)
    at = split.levels.index(split.peak_bytes) if nodes else 0
    later = set[str]().union(*last_used[at:])
    for position in sorted(range(len(nodes)), key=lambda position: abs(position - at)):
        node = nodes[position]
        if later & (node.get_buffer_names() if position <= at else last_used[position]):
            yield from ((node, parts) for parts in _ways(node))


class _Split:
    """The scheduler's nodes, some of them split."""

    def __init__(self, scheduler: Any, memory: KernelMemory, nodes: Sequence[Any],
                 apart: frozenset[str] = frozenset()) -> None:
        self._scheduler, self.memory, self.nodes = scheduler, memory, list(nodes)
        self._unfused = apart
        """Buffers of the split nodes."""

    @cached_property
    def levels(self) -> list[int]:
        """Bytes alive while each node runs, in the order of the graph."""
        return self.memory.levels(self.nodes)

    @cached_property
    def peak_bytes(self) -> int:
        """Maximum of the levels."""
        return max(self.levels, default=0)

    @cached_property
    def peaks(self) -> int:
        """Number of nodes at the peak."""
        return self.levels.count(self.peak_bytes)

    def with_unfused(self, node: Any, parts: Sequence[Any]) -> _Split:
        """The nodes with one more of them split, in the order of the graph again."""
        apart = self._unfused | node.get_buffer_names()
        nodes = [*(each for each in self.nodes if each is not node), *parts]
        for each in nodes:
            _restore_order(each, apart)
        nodes = self._scheduler.topological_sort_schedule(
            sorted(nodes, key=lambda each: each.min_order))
        return _Split(self._scheduler, self.memory, nodes, apart)

    def peak_bytes_as_run(self) -> int:
        """Peak of the nodes in their order of execution: Inductor tries others than that of the
        graph."""
        scheduler, nodes = self._scheduler, list(self.nodes)
        if inductor_config.reorder_for_peak_memory:
            nodes = reorder_for_peak_memory(
                nodes, scheduler.name_to_buf, scheduler.name_to_fused_node | self._of_members(),
                OrderedSet(V.graph.graph_inputs), OrderedSet(V.graph.get_output_names()))
        return max(self.memory.levels(nodes))

    def _of_members(self) -> dict[str, Any]:
        """The node that each op is a member of."""
        return {member.get_name(): node for node in self.nodes for member in node.get_nodes()}

    def settled(self) -> list[Any]:
        """The nodes, registered with the scheduler."""
        scheduler = self._scheduler
        scheduler.name_to_fused_node.update(self._of_members())
        for node in self.nodes:
            members = node.get_nodes()
            for table in _BY_NODE:
                known = getattr(scheduler, table, {})
                if node not in known and members[0] in known:
                    known[node] = known[members[0]]
        return self.nodes


def _restore_order(node: Any, apart: frozenset[str]) -> None:
    """Restore the ordering dependencies of a node that fusion had left out, on other parts of a
    split node."""
    for dep in node.read_writes.reads:
        if isinstance(dep, WeakDep) and dep.name in apart:
            node.unmet_dependencies.add(dep)


def _ways(node: Any) -> Iterator[list[Any]]:
    """The ways to split a fused node: for each result that nothing in it reads, the ops for that
    alone, and the rest."""
    if type(node) not in (FusedSchedulerNode, OuterLoopFusedSchedulerNode) or (
            node.is_template() or node.has_aliasing_or_mutation()):
        return
    members = list(node.get_nodes())
    readers: dict[Any, set[Any]] = {member: set() for member in members}
    for made_by in members:
        for member in members:
            if made_by.get_buffer_names() & {dep.name for dep in member.read_writes.reads}:
                readers[made_by].add(member)
    for last in members:
        if readers[last]:
            continue
        alone = {last}
        for member in reversed(members):
            if readers[member] and readers[member] <= alone:
                alone.add(member)
        if len(alone) < len(members):
            yield [_only(node, alone), _only(node, set(members) - alone)]


def _only(node: Any, members: Set[Any]) -> Any:
    """A fused node of only some of its members."""
    if type(node) is OuterLoopFusedSchedulerNode:
        outer = [_only(each, members) for each in node.get_outer_nodes()
                 if not members.isdisjoint(each.get_nodes())]
        return outer[0] if len(outer) == 1 else OuterLoopFusedSchedulerNode(
            node.scheduler, outer, node.outer_loop_fusion_depth)
    left = [member for member in node.get_nodes() if member in members]
    return left[0] if len(left) == 1 else FusedSchedulerNode(node.scheduler, left)
