"""Means of a loss written as sums, which a chunked part can add up.

A mean is a sum over the rows divided by a weight that depends only on the labels: the number of
labels that are not ignored, or the sum of their classes' weights.  The weight is computed first,
and divides the sum and the gradient that comes back.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from planner._graph_capture.joint_graph.chunks.emit import Emitter
from planner._graph_capture.joint_graph.chunks.rows import Reduction
from planner._graph_capture.joint_graph.joint import JointGraph

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
