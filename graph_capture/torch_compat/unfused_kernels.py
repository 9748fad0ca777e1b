"""Inductor's scheduler: splits kernels that were fused because they read the same.

Imported only if a step is planned for or run by Inductor, as `inductor`.

Inductor fuses two kernels that read the same although neither reads the other's result (horizontal
fusion), which saves a pass over the shared operands.  But then the results of both are alive at
once, where those of one might be freed before the other runs.  In the backward of attention with
dropout, this keeps the probabilities for the gradient of the values alive together with the
gradient of the scores: 49 MB of the 485 of a plan for BERT, and 4 MB of 143 for Llama's MLP.

Such a kernel is split only where that lowers the peak of its graph's kernels, run one by one
(`kernel_memory`).

Blind spots: candidates are searched at the peak in the order of the graph.  Inductor may run
kernels in another order that uses less memory; then that order decides if the found kernels stay
split, but not which are searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from functools import cached_property
from itertools import islice
from typing import Any

from planner._graph_capture.torch_compat.requirements import require

require(__name__)

from torch._inductor import config as inductor_config
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.dependencies import WeakDep
from torch._inductor.memory import reorder_for_peak_memory
from torch._inductor.scheduler import FusedSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from planner._graph_capture.torch_compat.kernel_memory import KernelMemory
from planner._graph_capture.torch_compat.scheduler_pass import SchedulerPass

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
        return self.memory.levels(self.memory.changes(self.nodes))

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
        return max(self.memory.levels(self.memory.changes(nodes)))

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
