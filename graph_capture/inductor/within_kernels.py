"""The graph of a step with generated kernels, in which some buffers never leave a kernel.

Such a buffer uses no memory.  The op that reads it computes it in one kernel, so it also reads the
sources of the buffer, which stay in memory until then and which it may overwrite.  Inductor
overwrites an operand only if nothing else is made of it afterwards, and if each element of the
result is made of the element at the same place.

The cost of one run: an op is *pointwise*, a *reduction* or *external* (a matrix product, a
convolution, attention: a library's kernel).  Pointwise ops are computed in the kernels that read
them, so they cost their arithmetic, and memory traffic only where an external kernel needs their
result in memory.  A reduction reads its operand once.  Neither allocates workspace.  An external op
costs the same as alone.  Arithmetic is counted in FLOPs per element: a few for most functions, some
tens for transcendental ones, and hundreds on a CPU for random numbers, which Inductor draws there
one by one.

Blind spots: the operand that Inductor overwrites where there are several; results that share an
operand and a kernel by decision of the scheduler; registers and caches; a pointwise value with many
readers, which Inductor's heuristics compute in each reader or store once.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from enum import Enum
from itertools import accumulate

import torch
from torch import fx

from planner._graph_capture.joint_graph.joint import is_view, tensors_of, traced_call
from planner._graph_capture.joint_graph.lower import RESIDENT, LoweredRegion
from planner._graph_capture.joint_graph.walks import readers
from planner._graph_capture.op_costs.costs import OpCost
from planner._graph_capture.op_costs.devices import DeviceModel
from planner._graph_capture.op_costs.flops import bytes_moved, op_flops, op_name
from planner._graph_capture.step.regions import RegionUse
from planner._graph_capture.torch_compat import OpOverload
from planner._graph_capture.torch_compat.symbols import is_dense
from planner._graph_capture.training_graph import (
    GeneratedKernels,
    Phase,
    SavingCosts,
    StepVariant,
    TrainingGraph,
    TrainingOp,
)


class Fusion(Enum):
    """The way in which Inductor runs an op."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    EXTERNAL = "external"


_POINTWISE = frozenset({
    "convert_element_type", "iota", "inductor_random", "inductor_randint", "inductor_lookup_seed",
    "full", "full_like", "scalar_tensor", "arange", "where", "clone", "constant_pad_nd",
    "embedding", "index", "gather", "slice_scatter", "select_scatter", "cat", "copy", "empty",
    "_unsafe_index", "flip", "roll", "masked_fill", "zeros", "ones", "zeros_like", "ones_like",
    "_low_memory_max_pool_offsets_to_indices",
})
"""Fused although torch does not tag them as pointwise."""

_REDUCTIONS = frozenset({
    "sum", "mean", "amax", "amin", "var_mean", "var", "std", "prod", "argmax", "argmin", "any",
    "all", "max", "min", "prepare_softmax_online", "fma_sum", "xor_sum", "nll_loss_forward",
    "_softmax", "_log_softmax", "native_layer_norm", "_softmax_backward_data",
    "_log_softmax_backward_data", "cumsum", "cumprod", "_low_memory_max_pool_with_offsets",
})

_FLOPS_OF = {
    **dict.fromkeys(("exp", "expm1", "log", "log1p", "log2", "tanh", "erf", "sigmoid", "sin", "cos",
                     "pow", "gelu", "silu", "atan2", "erfinv", "logit"), 20.0),
    **dict.fromkeys(("sqrt", "rsqrt", "div", "reciprocal", "fmod", "remainder"), 5.0),
}
_FLOPS_OF_RANDOM = {"cpu": 800.0}
_RANDOM = frozenset({"inductor_random", "inductor_randint"})
_FLOPS_OF_SAVED_MASK = {"cpu": 850.0}
"""FLOPs for each boolean that is written and read again.  Vector code on a CPU keeps masks as wide
as their numbers and converts them to and from bytes one by one: with AVX-512, 12 ns (8 to write, 4
to read), where drawing a mask's random number took 10."""


def fusion_of(node: fx.Node) -> Fusion:
    """The way in which Inductor runs the op of a node."""
    target = node.target
    if not isinstance(target, OpOverload):
        return Fusion.EXTERNAL
    name = op_name(target)
    if name in _REDUCTIONS:
        return Fusion.REDUCTION
    if name in _POINTWISE or torch.Tag.pointwise in target.tags:
        return Fusion.POINTWISE
    return Fusion.EXTERNAL


class FusedCosts:
    """Costs of the ops of a graph that Inductor compiles for one device."""

    def __init__(self, device: torch.device, alone: Callable[[fx.Node], OpCost],
                 model: DeviceModel) -> None:
        """`alone` gives the costs of an op that runs by itself; `model`: the device's speed."""
        self._device, self._alone, self.model = device, alone, model

    def __call__(self, node: fx.Node) -> OpCost:
        """The cost of a node, from its traced values."""
        fusion = fusion_of(node)
        if fusion is Fusion.EXTERNAL:
            return self._alone(node)
        call = traced_call(node)
        return OpCost(op_flops(node.target, *call), bytes_moved(node.target, *call),
                      self._seconds(node, fusion), 0)

    def saving_seconds(self, node: fx.Node) -> float:
        """Seconds to write the result of an op and to read it again; 0 if a kernel needs it in
        memory anyway."""
        if fusion_of(node) is not Fusion.POINTWISE or _is_read_from_outside(node):
            return 0.0
        made = tensors_of(node.meta.get("val"))
        masks = sum(tensor.numel() for tensor in made if tensor.dtype is torch.bool)
        per_mask = _FLOPS_OF_SAVED_MASK.get(self._device.type, 0.0)
        return (2 * self.model.traffic_seconds(sum(tensor.nbytes for tensor in made))
                + self.model.arithmetic_seconds(math.ceil(masks * per_mask), torch.float32))

    def _seconds(self, node: fx.Node, fusion: Fusion) -> float:
        made = tensors_of(node.meta.get("val"))
        name = op_name(node.target)
        per_element = _FLOPS_OF.get(name, 1.0)
        if name in _RANDOM:
            per_element = _FLOPS_OF_RANDOM.get(self._device.type, 20.0)
        if fusion is Fusion.REDUCTION:
            read = [tensor for source in node.all_input_nodes
                    for tensor in tensors_of(source.meta.get("val"))]
            elements = max((tensor.numel() for tensor in read), default=0)
            traffic = max((tensor.nbytes for tensor in read), default=0)
        else:
            elements = _elements(node)
            traffic = sum(tensor.nbytes for tensor in made) if _is_read_from_outside(node) else 0
        arithmetic = self.model.arithmetic_seconds(math.ceil(elements * per_element),
                                                    torch.float32)
        return arithmetic + self.model.traffic_seconds(traffic)


def fused_storages(region: LoweredRegion) -> frozenset[int]:
    """Storages of the backward that use no memory: a pointwise op makes them, and only generated
    kernels before the next external op read them. (Storages of the forward may be saved and use
    memory then.)"""
    kinds = [fusion_of(op.node) for op in region.ops]
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(region.ops):
        for storage in op.inputs:
            readers.setdefault(storage, []).append(index)
    external = [index for index, kind in enumerate(kinds) if kind is Fusion.EXTERNAL]
    held = {*region.held_outputs, *region.mutation_sources,
            *(storage for storage, _ in region.gradient_storages)}
    found = set()
    for storage, made in enumerate(region.storages):
        by, users = made.producer, readers.get(storage)
        if (by < region.num_forward or storage in held or not users
                or kinds[by] is not Fusion.POINTWISE):
            continue
        following = bisect(external, by)
        barrier = external[following] if following < len(external) else len(region.ops)
        if all(user < barrier and kinds[user] is not Fusion.EXTERNAL for user in users):
            found.add(storage)
    return frozenset(found)


def stays_in_one_kernel(region: LoweredRegion) -> frozenset[int]:
    """Storages with one maker and one reader in the forward, for as many elements: unless saved,
    the reader's kernel alone computes them, once."""
    readers: dict[int, list[fx.Node]] = {}
    for op in region.ops[:region.num_forward]:
        for storage in op.inputs:
            readers.setdefault(storage, []).append(op.node)
    return frozenset(
        storage for op in region.ops[:region.num_forward] for storage in op.outputs
        if len(readers.get(storage, ())) == 1
        and _elements(readers[storage][0]) <= _elements(op.node))


def _elements(node: fx.Node) -> int:
    """Number of elements of a node's results."""
    return sum(tensor.numel() for tensor in tensors_of(node.meta.get("val")))


def _is_read_from_outside(node: fx.Node) -> bool:
    """True if an external kernel reads the result, itself or a view of it."""
    return any(user.op != "output" and fusion_of(user) is Fusion.EXTERNAL
               for user in readers(node, is_view))


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
                to_read[buffer] = costs.model.traffic_seconds(graph.buffers[buffer].size_bytes)
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
