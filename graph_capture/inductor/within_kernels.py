"""The graph of a step with generated kernels, in which some buffers never leave a kernel.

Such a buffer uses no memory.  The op that reads it computes it in one kernel, so it also reads the
sources of the buffer, which stay in memory until then and which it may overwrite.  Inductor
overwrites an operand only if nothing else is made of it afterwards, and if each element of the
result is made of the element at the same place.

Blind spots: the operand that Inductor overwrites where there are several; results that share an
operand and a kernel by decision of the scheduler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from itertools import accumulate

import torch
from torch import fx

from planner._graph_capture.inductor.fused_costs import (
    FusedCosts,
    Fusion,
    fused_storages,
    fusion_of,
    stays_in_one_kernel,
)
from planner._graph_capture.joint_graph.lower import RESIDENT, LoweredRegion
from planner._graph_capture.step.regions import RegionUse
from planner._graph_capture.torch_compat.symbols import is_dense
from planner._graph_capture.training_graph import (
    GeneratedKernels,
    Phase,
    SavingCosts,
    StepVariant,
    TrainingGraph,
    TrainingOp,
)


def within_kernels(graph: TrainingGraph, uses: Sequence[RegionUse]) -> TrainingGraph:
    """The graph of a step, as captured, in which some buffers never leave a kernel."""
    return _KernelGraph(graph, uses).graph


def buffer_of(graph: TrainingGraph, lowered: LoweredRegion, storage: int) -> int:
    """The buffer of the graph for a storage that an op of the region made."""
    producer = lowered.ops[lowered.storages[storage].producer]
    op = graph.ops[graph.index_of[producer.name]]
    return op.outputs[producer.outputs.index(storage)]


class _KernelGraph:
    """The graph of a step while it is changed op by op."""

    def __init__(self, graph: TrainingGraph, uses: Sequence[RegionUse]) -> None:
        self._captured = graph
        self._fused = frozenset(buffer_of(graph, use.lowered, storage)
                                for use in uses for storage in fused_storages(use.lowered))
        self._buffers = tuple(replace(buffer, size_bytes=0) if index in self._fused else buffer
                              for index, buffer in enumerate(graph.buffers))
        self._nodes: dict[int, fx.Node] = {}
        self._operands: dict[int, list[tuple[int, bool]]] = {}
        """Buffers that an op reads; true if each element of its result is made of the element at
        the same place."""
        for use in uses:
            for op in use.lowered.ops:
                index = graph.index_of[op.name]
                self._nodes[index] = op.node
                self._operands[index] = [
                    (buffer_of(graph, use.lowered, storage), _same_place(operand, op.node))
                    for operand in op.node.all_input_nodes
                    for storage in (use.lowered.storage_of.get(operand, RESIDENT),)
                    if storage != RESIDENT and use.lowered.storages[storage].producer >= 0]
        self._kinds = {index: fusion_of(node) for index, node in self._nodes.items()}
        ops = self._reading_sources()
        self.graph = replace(graph, buffers=self._buffers, ops=self._writing_over_sources(ops))

    def _reading_sources(self) -> tuple[TrainingOp, ...]:
        """The ops, each with the sources of the fused buffers it reads added to its inputs."""
        sources: dict[int, tuple[int, ...]] = {}
        ops = []
        for op in self._captured.ops:
            inputs = _unique(source for buffer in op.inputs
                             for source in (buffer, *sources.get(buffer, ())))
            sources.update({buffer: inputs for buffer in op.outputs if buffer in self._fused})
            ops.append(replace(op, inputs=inputs))
        return tuple(ops)

    def _writing_over_sources(self, ops: Sequence[TrainingOp]) -> tuple[TrainingOp, ...]:
        """The ops; pointwise ones with all the operands that their results may overwrite."""
        is_read_beside = self._read_beside(ops)
        alike: dict[int, tuple[int, ...]] = {}
        """Sources of a fused buffer that are read at the same place only."""
        unlike: dict[int, Set[int]] = {}
        """Its sources that are read at other places."""
        changed = []
        for index, op in enumerate(ops):
            over = tuple(buffer for buffer in op.inplace if buffer not in self._fused)
            if self._kinds.get(index) is Fusion.POINTWISE and len(op.outputs) == 1:
                made = op.outputs[0]
                elsewhere: set[int] = set()
                here: list[int] = []
                for buffer, same in self._operands[index]:
                    if buffer in self._fused:
                        elsewhere.update(unlike[buffer], () if same else alike[buffer])
                        here.extend(alike[buffer] if same else ())
                    else:
                        (here.append if same else elsewhere.add)(buffer)
                found = tuple(buffer for buffer in _unique(here) if buffer not in elsewhere)
                if made in self._fused:
                    alike[made], unlike[made], over, found = found, elsewhere, (), ()
                size_bytes = self._buffers[made].size_bytes
                over = _unique((*over, *(
                    buffer for buffer in found
                    if self._buffers[buffer].size_bytes == size_bytes
                    and not is_read_beside(buffer, index))))
            changed.append(replace(op, inplace=over))
        return tuple(changed)

    def _read_beside(self, ops: Sequence[TrainingOp]) -> Callable[[int, int], bool]:
        """Return a predicate of a buffer and an op: true if another pointwise op of the backward
        makes another result from the buffer, probably in the op's kernel."""
        stretch = list(accumulate(not self._is_generated(index) for index in range(len(ops))))
        readers: dict[tuple[int, int], set[int]] = defaultdict(set)
        for index, op in enumerate(ops):
            if (op.phase is Phase.BACKWARD and self._kinds.get(index) is Fusion.POINTWISE
                    and not self._fused.issuperset(op.outputs)):
                for buffer in op.inputs:
                    readers[buffer, stretch[index]].add(index)

        def is_read(buffer: int, index: int) -> bool:
            return not readers[buffer, stretch[index]] <= {index}

        return is_read

    def _is_generated(self, index: int) -> bool:
        return self._kinds.get(index) in (Fusion.POINTWISE, Fusion.REDUCTION)


def _same_place(operand: fx.Node, node: fx.Node) -> bool:
    """True if an operand fills its storage and has the layout of the node's result."""
    value, result = operand.meta.get("val"), node.meta.get("val")
    return (isinstance(value, torch.Tensor) and isinstance(result, torch.Tensor)
            and value.shape == result.shape and value.stride() == result.stride()
            and value.storage_offset() == 0 and is_dense(value)
            and value.untyped_storage().nbytes() == value.numel() * value.element_size())


def _unique(buffers: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(buffers))


def compiled_variant(graph: TrainingGraph, uses: Sequence[RegionUse], costs: FusedCosts | None, *,
                     low_peak: bool, chunks: tuple[int, int] = (1, 1)) -> StepVariant:
    """The variant of a step that Inductor compiles; `costs`: `None` if time does not count."""
    return StepVariant(
        within_kernels(graph, uses), low_peak, *chunks,
        saved_by_default=_saved_by_default(graph, uses), kernels=_kernels(graph, uses),
        saving_costs=SavingCosts() if costs is None else _saving_costs(graph, uses, costs))


def _kernels(graph: TrainingGraph, uses: Sequence[RegionUse]) -> GeneratedKernels:
    kinds = {graph.index_of[op.name]: fusion_of(op.node) for use in uses for op in use.lowered.ops}
    return GeneratedKernels(
        frozenset(index for index, kind in kinds.items() if kind is Fusion.POINTWISE),
        frozenset(index for index in range(len(graph.ops))
                  if kinds.get(index, Fusion.EXTERNAL) is Fusion.EXTERNAL))


def _saving_costs(graph: TrainingGraph, uses: Sequence[RegionUse], costs: FusedCosts
                  ) -> SavingCosts:
    to_save, to_read = {}, {}
    for use in uses:
        in_one = stays_in_one_kernel(use.lowered)
        for op in use.lowered.ops[:use.lowered.num_forward]:
            seconds = costs.saving_seconds(op.node)
            for storage in op.outputs:
                buffer = buffer_of(graph, use.lowered, storage)
                to_read[buffer] = costs.reading_seconds(graph.buffers[buffer].size_bytes)
                if seconds and storage in in_one:
                    to_save[buffer] = seconds
    return SavingCosts(to_save, to_read)


def _saved_by_default(graph: TrainingGraph, uses: Sequence[RegionUse]) -> frozenset[int]:
    """Buffers that Inductor's own partitioner saves."""
    return frozenset(
        buffer_of(graph, use.lowered, storage)
        for use in uses for node, storage in use.lowered.storage_of.items()
        if node.name in use.lowered.saved_by_default and storage != RESIDENT
        and use.lowered.storages[storage].producer >= 0)
