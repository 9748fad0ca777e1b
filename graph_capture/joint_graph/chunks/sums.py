"""Sums over the chunks of a part, and means of a loss written as sums, which chunks can add up.

Sums of less than 32 bits are added up in float32 and rounded once.  For sums of matrix products,
such as gradients of weights, the product adds itself to the total and needs no memory of its own.
On a CPU a bfloat16 or float16 product with operands smaller than its result runs in float32 for
that: otherwise each chunk would be computed and then converted for the addition, each as large as
the weight, which takes longer than a float32 product of few rows.  On a GPU the float32 product is
the slow one, and an addition converts as it reads.

A mean is a sum over the rows divided by a weight that depends only on the labels: the number of
labels that are not ignored, or the sum of their classes' weights.  The weight is computed first,
and divides the sum and the gradient that comes back.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner._graph_capture.joint_graph.chunks.rows import ADDING, CASTS, Reduction
from planner._graph_capture.joint_graph.joint import JointGraph, is_view

_aten = torch.ops.aten


def means_to_sums(joint: JointGraph) -> None:
    """Rewrite each mean over all elements, and each mean of a negative log-likelihood."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=_aten.mean.default):
        source = node.args[0]
        value = source.meta["val"]
        if not node.kwargs and value.is_floating_point():
            emit = Emitter(graph, node)
            total = emit(_aten.sum.default, source, like=node)
            node.replace_all_uses_with(
                emit(_aten.div.Tensor, total, math.prod(value.shape), like=node))
            graph.erase_node(node)
    weights: dict[tuple[object, ...], fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default)):
        if node.args[3] == Reduction.MEAN:
            labels = _labels_of(node.args)
            weights[labels] = _rewrite_forward(graph, node)
    for node in list(graph.find_nodes(op="call_function", target=_aten.nll_loss_backward.default)):
        gradient, *args, _ = node.args
        weight = weights.get(_labels_of(args))
        if args[3] == Reduction.MEAN and weight is not None:
            emit = Emitter(graph, node)
            shared = emit(_aten.div.Tensor, gradient, weight, like=node)
            node.update_arg(0, shared)
            node.update_arg(4, int(Reduction.SUM))
            node.update_arg(6, weight)


def _labels_of(args: Sequence[object]) -> tuple[object, ...]:
    """The arguments of a likelihood on which the weight of its mean depends."""
    return args[1], args[2], args[4]


def _rewrite_forward(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Rewrite one mean likelihood; returns the weight by which the sum is divided."""
    scores, target, weight, _, ignored = node.args
    emit = Emitter(graph, node)
    counted = emit(_aten.ne.Scalar, target, ignored, like=node)
    if weight is None:
        total = emit(_aten.sum.default, counted, like=node)
        total = emit(_aten._to_copy.default, total, like=node,
                     dtype=scores.meta["val"].dtype)
    else:
        labels = emit(_aten.mul.Tensor, target, counted, like=node)
        of_each = emit(_aten.index.Tensor, weight, [labels], like=node)
        total = emit(_aten.sum.default, emit(_aten.mul.Tensor, of_each, counted, like=node),
                     like=node)
    summed = emit(_aten.nll_loss_forward.default, scores, target, weight, int(Reduction.SUM),
                  ignored, like=node)
    loss = emit(operator.getitem, summed, 0, like=node)
    mean = emit(_aten.div.Tensor, loss, total, like=node)
    for user in list(node.users):
        user.replace_all_uses_with(mean if user.args[1] == 0 else total)
        graph.erase_node(user)
    graph.erase_node(node)
    return total


_NOT_TAKEN_OVER = frozenset({"val", "tensor_meta", "eager_input_vals", "unbacked_bindings"})


class Emitter:
    """Inserts nodes before another one."""

    def __init__(self, graph: fx.Graph, before: fx.Node, *, compiled: bool = False) -> None:
        """`compiled`: the graph has Inductor's decompositions."""
        self._graph, self._compiled = graph, compiled
        self._before = before
        self._mode = next(node.meta["val"].fake_mode for node in graph.nodes
                          if hasattr(node.meta.get("val"), "fake_mode"))

    def __call__(self, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any
                 ) -> fx.Node:
        """A new call, attributed to the source code of `like`."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key not in _NOT_TAKEN_OVER}
        values = fx.node.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        with self._mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def cast(self, value: fx.Node, dtype: torch.dtype, *, like: fx.Node) -> fx.Node:
        """A new conversion to another dtype."""
        if self._compiled:
            return self(torch.ops.prims.convert_element_type.default, value, dtype, like=like)
        return self(_aten._to_copy.default, value, like=like, dtype=dtype)


def added(emit: Emitter, total: fx.Node | None, chunk: fx.Node, like: fx.Node) -> fx.Node:
    """The sum of a chunk and of those before it, if any."""
    if total is None:
        return emit.cast(chunk, torch.float32, like=like) if _is_short(chunk) else chunk
    return emit(_aten.add.Tensor, total, chunk, like=like)


def added_product(emit: Emitter, total: fx.Node | None, operands: Sequence[fx.Node],
                  made: Collection[fx.Node], like: fx.Node) -> tuple[fx.Node, fx.Node]:
    """A chunk of a matrix product, and its sum with those before it: one op if the product adds
    itself.  `made`: earlier results of the chunk."""
    if _is_short(like):
        exact = [_before_cast(operand, made) for operand in operands]
        if like.meta["val"].device.type != "cpu" or (
                sum(each.elements for each in exact) > like.meta["val"].numel()):
            chunk = emit(like.target, *operands, like=like)
            return chunk, added(emit, total, chunk, like)
        operands = [each.put(emit, like) for each in exact]
    product = (emit(like.target, *operands, like=like) if total is None
               else emit(ADDING[like.target], total, *operands, like=like))
    return product, product


def ops_behind_sum(node: fx.Node, ours: Collection[fx.Node]) -> tuple[fx.Node, ...]:
    """The op whose results are added up for the sum `node`, and the ops that make `node` from the
    total.

    If `node` is a cast to float32, as autocast casts gradients of weights, these are the operand of
    the cast, views of it and the cast; otherwise only `node`.
    """
    ops = [node]
    while (ops[0] is node or is_view(ops[0])) and len(ops[0].all_input_nodes) == 1 and (
            (source := ops[0].all_input_nodes[0]) in ours and len(source.users) == 1):
        ops.insert(0, source)
    is_cast = (node.target in CASTS and _is_short(ops[0])
               and node.meta["val"].dtype is torch.float32)
    return tuple(ops) if is_cast and not any(user in ours for user in node.users) else (node,)


def whole_of(emit: Emitter, total: fx.Node, ops: Sequence[fx.Node]) -> fx.Node:
    """The total after the ops behind a sum, rounded as they round it."""
    for view in ops[1:-1]:
        total = emit(view.target, total, *view.args[1:], like=view, **view.kwargs)
    dtype = ops[-1].meta["val"].dtype
    return total if total.meta["val"].dtype is dtype else emit.cast(total, dtype, like=ops[-1])


def _is_short(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.is_floating_point() and value.itemsize < 4)


@dataclass(frozen=True, slots=True)
class _Exact:
    """A value in float32: a source, and the views of it to emit again."""

    source: fx.Node
    views: tuple[fx.Node, ...] = ()

    @property
    def elements(self) -> int:
        return int(self.source.meta["val"].numel())

    def put(self, emit: Emitter, like: fx.Node) -> fx.Node:
        node = self.source
        if node.meta["val"].dtype is not torch.float32:
            node = emit.cast(node, torch.float32, like=like)
        for view in self.views:
            node = emit(view.target, node, *view.args[1:], like=view, **view.kwargs)
        return node


def _before_cast(operand: fx.Node, made: Collection[fx.Node]) -> _Exact:
    """The operand before it was rounded from float32 in the same chunk; otherwise itself."""
    node, views = operand, []
    while node in made and is_view(node) and len(node.all_input_nodes) == 1:
        views.append(node)
        node = node.all_input_nodes[0]
    if node in made and node.target in CASTS:
        source = node.all_input_nodes[0]
        mine, theirs = source.meta["val"], node.meta["val"]
        if mine.dtype is torch.float32 and mine.device == theirs.device and (
                mine.stride() == theirs.stride()):
            return _Exact(source, tuple(reversed(views)))
    return _Exact(operand)
