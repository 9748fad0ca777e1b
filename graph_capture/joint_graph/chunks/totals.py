"""Sums over the chunks of a part.

Sums of less than 32 bits are added up in float32 and rounded once.  For sums of matrix products,
such as gradients of weights, the product adds itself to the total and needs no memory of its own.
On a CPU a bfloat16 or float16 product with operands smaller than its result runs in float32 for
that: otherwise each chunk would be computed and then converted for the addition, each as large as
the weight, which takes longer than a float32 product of few rows.  On a GPU the float32 product is
the slow one, and an addition converts as it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from planner._graph_capture.joint_graph.chunks.emit import CASTS, Emitter
from planner._graph_capture.joint_graph.chunks.rows import ADDING
from planner._graph_capture.joint_graph.joint import is_view

_aten = torch.ops.aten


def added(emit: Emitter, total: fx.Node | None, piece: fx.Node, like: fx.Node) -> fx.Node:
    """The sum of a chunk and of those before it, if any."""
    if total is None:
        return emit.cast(piece, torch.float32, like=like) if _is_short(piece) else piece
    return emit(_aten.add.Tensor, total, piece, like=like)


def added_product(emit: Emitter, total: fx.Node | None, operands: Sequence[fx.Node],
                  made: Collection[fx.Node], like: fx.Node) -> tuple[fx.Node, fx.Node]:
    """A chunk of a matrix product, and its sum with those before it: one op if the product adds
    itself.  `made`: earlier results of the chunk."""
    if _is_short(like):
        exact = [_before_cast(operand, made) for operand in operands]
        if like.meta["val"].device.type != "cpu" or (
                sum(each.elements for each in exact) > like.meta["val"].numel()):
            piece = emit(like.target, *operands, like=like)
            return piece, added(emit, total, piece, like)
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
