"""Parts of a step run in chunks: loss heads and insides of layers, a number of rows at a time.

The minimum peak of a language model is its logits, with their log-softmax and its gradient: no
placement of checkpoints lowers it.  Fused and chunked losses (Liger Kernel, arXiv 2410.10989; Cut
Cross-Entropy, arXiv 2411.09009) process a chunk of the rows at a time, so only a chunk of the
logits exists.  Here the joint graph is unrolled: each op of the part (`part`) runs once for each
chunk; rows made by the chunks are concatenated, and sums are added up.

Forward and backward run together, chunk by chunk, where the part's backward depends on one scalar,
the gradient of the loss.  It is replaced by 1, and the part's gradients are multiplied by it in the
backward (exactly, if it is 1 or another power of two).  Gradients in float16 may be too small
without the loss's scale, so there, and in the insides of layers, the backward has
its own chunks, and the schedule decides what is kept and what is recomputed.

Rounding differs: sums over rows are sums of the chunks' sums.  Those of less than 32 bits are added
up in float32 and rounded once.  For sums of matrix products, such as gradients of weights, the
product adds itself to the total and needs no memory of its own.  On a CPU a bfloat16 or float16
product with operands smaller than its result runs in float32 for that: otherwise each chunk would
be converted for the addition, each as large as the weight, which takes longer than a float32
product of few rows.  On a GPU the float32 product is the slow one.

A mean is a sum over the rows divided by a weight that depends only on the labels: the number of
labels that are not ignored, or the sum of their classes' weights.  The weight is computed first,
and divides the sum and the gradient that comes back.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from planner._graph_capture.joint_graph.chunks.part import Part, find_inner_parts, find_part
from planner._graph_capture.joint_graph.chunks.rows import ADDING, CASTS, Kind, Reduction, Rows
from planner._graph_capture.joint_graph.joint import (
    Emitter,
    JointGraph,
    eliminate_dead_code,
    is_tuple_element,
    is_view,
    unviewed,
)
from planner._graph_capture.joint_graph.replay import RUNS_ONCE
from planner._graph_capture.joint_graph.walks import ancestors, descendants

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Chunked:
    """A graph with parts that run in chunks."""

    joint: JointGraph
    chunks: int
    """Number of chunks of the widest part; 1 if there is no such part."""
    inner_chunks: int
    """Number of chunks of the insides of layers; 1 if there are none."""
    elided: tuple[int, ...]
    """Elided outputs of the forward: their positions."""


def run_in_chunks(joint: JointGraph, count: int, unread: Collection[int] = (),
                  inner_count: int = 1, *, compiled: bool = False) -> Chunked:
    """Change the graph so that the widest part of the step runs in `count` chunks, or one for each
    row, and, if `inner_count` is more than 1, the insides of layers in so many.

    `unread`: outputs of the forward, mutated inputs not counted, that nobody reads.  A placeholder
    of the same shape replaces those that would be made in chunks.  `compiled`: the graph has
    Inductor's decompositions.
    """
    means_to_sums(joint)
    joint = joint.described_anew()
    dropped = {joint.returned[place] for place in unread}
    returned = {node for place, node in enumerate(joint.forward_outputs)
                if node is not None and place not in dropped}
    widest = find_part(joint, returned)
    inner: list[Part] = []
    if inner_count > 1:
        is_loss = widest is not None and _gradient_of_loss(joint, widest) is not None
        inner = find_inner_parts(
            joint, returned, set(widest.nodes) if widest is not None and is_loss else set())
        if widest is not None and any(set(widest.nodes) & set(part.nodes) for part in inner):
            widest = None  # it is one of them
    elided = [] if widest is None else _without_unread(joint, widest, dropped)
    parts = [(part, min(inner_count, part.rows)) for part in inner]
    if widest is not None:
        parts.append((widest, min(count, widest.rows)))
    stands_for: dict[fx.Node, fx.Node] = {}
    for part, number in parts:
        unrolling = _Unrolling(joint, part, number, stands_for, compiled)
        scale = _gradient_of_loss(joint, part)
        if scale is not None and not _can_be_scaled(part):
            scale = None
        if scale is None:
            unrolling.run(part.forward)
            unrolling.run(part.backward)
        else:
            unrolling.without(scale)
            unrolling.run(part.nodes)
    for part, _ in parts:
        for node in reversed(part.nodes):
            joint.graph.erase_node(node)
    _sort(joint.graph)
    eliminate_dead_code(joint.graph)
    joint.graph.lint()
    return Chunked(
        joint.described_anew(), 1 if widest is None else min(count, widest.rows),
        max((number for part, number in parts if part is not widest), default=1),
        tuple(map(joint.returned.index, elided)))


def _without_unread(joint: JointGraph, part: Part, dropped: Collection[int]) -> list[int]:
    """Replace outputs that the part makes rows of by tensors that use no memory; returns their
    positions."""
    output = joint.output
    values = list(output.args[0])
    emit = Emitter(joint.graph, part.nodes[0])
    made, found = set(map(unviewed, part.nodes)), []
    for place in sorted(dropped):
        node = values[place]
        if isinstance(node, fx.Node) and unviewed(node) in made:
            value = node.meta["val"]
            single = emit(_aten.full.default, [1] * value.ndim, math.nan, like=node,
                          dtype=value.dtype, device=value.device)
            values[place] = emit(_aten.expand.default, single, list(value.shape), like=node)
            found.append(place)
    output.args = (type(output.args[0])(values), *output.args[1:])
    return found


def _gradient_of_loss(joint: JointGraph, part: Part) -> fx.Node | None:
    """The scalar gradient of the loss, if the part's backward depends on nothing else that the
    forward lacks."""
    ours = set(part.nodes)
    sources = {operand for node in part.backward for operand in node.all_input_nodes} - ours
    above = ancestors(sources, lambda node: node not in ours)
    found = above.intersection(joint.cotangents)
    if len(found) != 1 or descendants(ours) & above or any(
            part.layouts[operand] is Kind.SUM for node in part.backward
            for operand in node.all_input_nodes if operand in part.forward):
        return None
    cotangent = found.pop()
    return cotangent if cotangent.meta["val"].numel() == 1 else None


def _can_be_scaled(part: Part) -> bool:
    """True if all results of a part's backward can be multiplied by the gradient of the loss."""
    ours = set(part.nodes)
    return all(isinstance(value := node.meta["val"], torch.Tensor) and value.is_floating_point()
               and value.dtype is not torch.float16 for node in part.backward
               if any(user not in ours for user in node.users))


class _Unrolling:
    """Puts the chunks of a part into the graph."""

    def __init__(self, joint: JointGraph, part: Part, count: int,
                 stands_for: dict[fx.Node, fx.Node], compiled: bool) -> None:
        self._graph, self._compiled = joint.graph, compiled
        self._part = part
        bounds = [part.rows * number // count for number in range(count + 1)]
        self._ranges = list(itertools.pairwise(bounds))
        self._made: list[dict[fx.Node, fx.Node]] = [{} for _ in self._ranges]
        self._cut: list[dict[tuple[fx.Node, Rows], fx.Node]] = [{} for _ in self._ranges]
        self._stands_for = stands_for
        """New nodes -> the nodes of a part, this one or an earlier one, that they replace."""
        self._scale: fx.Node | None = None
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._whole: dict[fx.Node, fx.Node] = {}

    def without(self, scale: fx.Node) -> None:
        """Replace this cotangent by 1 in the part, and multiply the part's results by it."""
        graph, part = self._graph, self._part
        first = min(part.nodes, key=list(graph.nodes).index)
        of_scale = descendants((scale,))
        ours = set(part.nodes)
        outside = ancestors(
            (operand for node in part.nodes for operand in node.all_input_nodes
             if operand not in ours), lambda node: node.op == "call_function")
        value = scale.meta["val"]
        emit = Emitter(graph, first)
        self._replaced[scale] = emit(
            _aten.full.default, list(value.shape), 1, like=part.backward[0], dtype=value.dtype,
            device=value.device)
        is_behind = False
        for node in list(graph.nodes):
            is_behind |= node is first
            if node in outside and node in of_scale:
                self._replaced[node] = emit(
                    node.target, *fx.node.map_arg(node.args, self._in_forward), like=node,
                    **fx.node.map_arg(node.kwargs, self._in_forward))
            elif node in outside and is_behind:
                first.prepend(node)
        self._scale = scale

    def _in_forward(self, node: fx.Node) -> fx.Node:
        return self._replaced.get(node, node)

    def run(self, nodes: Sequence[fx.Node]) -> None:
        """Put chunks of these ops, and their combined results, in front of the last of them."""
        if not nodes:
            return
        together = self._scale is not None and self._part.forward
        emit = Emitter(self._graph, (together or nodes)[-1], compiled=self._compiled)
        ours = set(nodes)
        every = set(self._part.nodes)
        handed_on = [node for node in nodes if any(
            user not in every or (user not in ours and self._part.layouts[node] is Kind.SUM)
            for user in node.users)]
        summed = {node: ops_behind_sum(node, ours) for node in handed_on
                  if self._part.layouts[node] is Kind.SUM}
        sources = {ops[0] for ops in summed.values()}
        of_totals = {op for ops in summed.values() for op in ops[1:]}
        totals: dict[fx.Node, fx.Node] = {}
        for number in range(len(self._ranges)):
            for node in nodes:
                if node in of_totals:
                    continue
                if (node in sources and node.target in ADDING
                        and of_totals.issuperset(ours.intersection(node.users))):
                    totals[node] = self._product(emit, node, number, ours, totals.get(node))
                    continue
                self._made[number][node] = self._chunk(emit, node, number, ours)
                if node in sources:
                    totals[node] = added(emit, totals.get(node), self._made[number][node], node)
        late = descendants((self._scale,)) if self._scale is not None else set()
        for node in handed_on:
            whole = (whole_of(emit, totals[summed[node][0]], summed[node]) if node in summed
                     else self._together(emit, node))
            self._whole[node] = whole
            users = [user for user in node.users if user not in every]
            if node in late and users:
                assert self._scale is not None
                # In its old place: at the end, the gradients of all layers are alive as well.
                whole = Emitter(self._graph, node)(
                    _aten.mul.Tensor, whole, self._scale, like=node)
            self._stands_for[whole] = node
            for user in users:
                user.replace_input_with(node, whole)

    def _chunk(self, emit: Emitter, node: fx.Node, number: int, ours: set[fx.Node]) -> fx.Node:
        """One chunk of the result of `node`."""
        if is_tuple_element(node):
            return emit(node.target, self._made[number][node.args[0]], node.args[1], like=node)
        operand = partial(self._operand, emit, node, number, ours)
        args = list(fx.node.map_arg(node.args, operand))
        action = self._part.actions[node]
        if action.shape_argument is not None:
            layout = action.results[0]
            assert isinstance(layout, Rows)
            begin, end = self._ranges[number]
            args[action.shape_argument] = layout.chunk(node.meta["val"].shape, end - begin)
        return self._once(emit(
            node.target, *args, like=node, **fx.node.map_arg(node.kwargs, operand)))

    def _operand(self, emit: Emitter, node: fx.Node, number: int, ours: set[fx.Node],
                 source: fx.Node) -> fx.Node:
        """The operand that a chunk of `node` reads in place of `source`."""
        if (source in self._whole and source not in ours
                and self._part.layouts[source] is Kind.SUM):
            return self._whole[source]  # of the forward, complete
        if source in self._made[number]:
            return self._made[number][source]
        layout = self._part.actions[node].operands.get(
            self._stands_for.get(source, source), Kind.WHOLE)
        source = self._replaced.get(source, source)
        return self._slice(emit, source, layout, number) if isinstance(layout, Rows) else source

    def _product(self, emit: Emitter, node: fx.Node, number: int, ours: set[fx.Node],
                 total: fx.Node | None) -> fx.Node:
        """One chunk of a matrix product, and its sum with the total before it."""
        operands = [self._operand(emit, node, number, ours, source) for source in node.args]
        chunk, total = added_product(emit, total, operands, self._made[number].values(), node)
        self._once(chunk)
        return total

    def _once(self, node: fx.Node) -> fx.Node:
        node.meta[RUNS_ONCE] = self._scale is not None
        return node

    def _slice(self, emit: Emitter, source: fx.Node, layout: Rows, number: int) -> fx.Node:
        """A view of one chunk of a value from outside the part."""
        cut = self._cut[number]
        if (source, layout) not in cut:
            shape = list(source.meta["val"].shape)
            begin, end = self._ranges[number]
            node, start = source, layout.start
            if layout.stop - layout.start > 1:
                node = emit(_aten.view.default, node,
                            [*shape[:start], self._part.rows, *shape[layout.stop:]], like=source)
            node = emit(_aten.slice.Tensor, node, start, begin, end, like=source)
            if layout.stop - layout.start > 1:
                node = emit(_aten.view.default, node, layout.chunk(shape, end - begin), like=source)
            cut[source, layout] = node
        return cut[source, layout]

    def _together(self, emit: Emitter, node: fx.Node) -> fx.Node:
        """The concatenated rows of all chunks."""
        layout = self._part.layouts[node]
        assert isinstance(layout, Rows)
        value = node.meta["val"]
        whole = emit(_aten.cat.default, [made[node] for made in self._made], layout.stop - 1,
                     like=node)
        if layout.stop - layout.start > 1:
            whole = emit(_aten.view.default, whole, list(value.shape), like=node)
        return whole


def _sort(graph: fx.Graph) -> None:
    """Put each node behind its operands, as near to its old place as possible."""
    nodes = list(graph.nodes)
    rank = {node: position for position, node in enumerate(nodes)}
    missing = {node: len(node.all_input_nodes) for node in nodes}
    ready = [rank[node] for node in nodes if not missing[node]]
    heapq.heapify(ready)
    previous: fx.Node | None = None
    while ready:
        node = nodes[heapq.heappop(ready)]
        if previous is not None:
            previous.append(node)
        previous = node
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, rank[user])


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
