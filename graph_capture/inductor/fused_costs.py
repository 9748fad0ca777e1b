"""Cost of one run of an op that Inductor fuses with its neighbours.

The model of the world: an op is *pointwise*, a *reduction* or *external* (a matrix product, a
convolution, attention: a library's kernel).  Pointwise ops are computed in the kernels that read
them, so they cost their arithmetic, and memory traffic only where an external kernel needs their
result in memory.  A reduction reads its operand once.  Neither allocates workspace.  An external op
costs the same as alone.

Arithmetic is counted in FLOPs per element: a few for most functions, some tens for transcendental
ones, and hundreds on a CPU for random numbers, which Inductor draws there one by one.

Blind spots: registers and caches; a pointwise value with many readers, which Inductor's heuristics
compute in each reader or store once.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable
from enum import Enum

import torch
from torch import fx

from planner._graph_capture.joint_graph.joint import is_view, tensors_of
from planner._graph_capture.joint_graph.lower import LoweredRegion
from planner._graph_capture.joint_graph.walks import readers
from planner._graph_capture.op_costs.costs import OpCost
from planner._graph_capture.op_costs.devices import DeviceModel
from planner._graph_capture.op_costs.flops import bytes_moved, op_flops, op_name
from planner._graph_capture.torch_compat import OpOverload


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
        self._device, self._alone, self._model = device, alone, model

    def __call__(self, node: fx.Node) -> OpCost:
        """The cost of a node, from its traced values."""
        fusion = fusion_of(node)
        if fusion is Fusion.EXTERNAL:
            return self._alone(node)
        args = fx.map_arg(node.args, lambda source: source.meta.get("val"))
        kwargs = fx.map_arg(dict(node.kwargs), lambda source: source.meta.get("val"))
        out = node.meta.get("val")
        flops = op_flops(node.target, args, kwargs, out)
        moved = bytes_moved(node.target, args, kwargs, out)
        return OpCost(flops, moved, self._seconds(node, fusion), 0)

    def saving_seconds(self, node: fx.Node) -> float:
        """Seconds to write the result of an op and to read it again; 0 if a kernel needs it in
        memory anyway."""
        if fusion_of(node) is not Fusion.POINTWISE or _is_read_from_outside(node):
            return 0.0
        made = tensors_of(node.meta.get("val"))
        masks = sum(tensor.numel() for tensor in made if tensor.dtype is torch.bool)
        per_mask = _FLOPS_OF_SAVED_MASK.get(self._device.type, 0.0)
        return 2 * self.reading_seconds(sum(map(_bytes, made))) + self._model.arithmetic_seconds(
            math.ceil(masks * per_mask), torch.float32)

    def reading_seconds(self, size_bytes: int) -> float:
        """Seconds to read so many bytes from memory."""
        return self._model.traffic_seconds(size_bytes)

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
            traffic = max((_bytes(tensor) for tensor in read), default=0)
        else:
            elements = _elements(node)
            traffic = sum(map(_bytes, made)) if _is_read_from_outside(node) else 0
        arithmetic = self._model.arithmetic_seconds(math.ceil(elements * per_element),
                                                    torch.float32)
        return arithmetic + self._model.traffic_seconds(traffic)


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


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
