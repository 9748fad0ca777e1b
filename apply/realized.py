"""Results of the backward that Inductor has to store.

Inductor recomputes a pointwise result in each kernel that reads it, and so keeps its operands alive
until the last of them.  A schedule assumes otherwise: a result that is read after a kernel of a
library is stored, and its operands are freed.  Such results are marked to be stored where they are
made, unless their operands are smaller.
"""

from __future__ import annotations

from bisect import bisect_right

import torch
from torch import fx

from planner._graph_capture.inductor.fused_costs import Fusion, fusion_of
from planner._graph_capture.joint_graph.joint import is_tuple_element, is_view, tensors_of
from planner._graph_capture.joint_graph.walks import operands, readers
from planner._graph_capture.torch_compat.inductor import is_stored, store_result


def realize_across_library_calls(graph: fx.Graph) -> None:
    """Mark results of generated kernels that are read after a kernel of a library."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    external = [position for node, position in order.items() if _is_external(node)]
    for node, position in order.items():
        following = bisect_right(external, position)
        if (_is_generated(node) and isinstance(node.meta.get("val"), torch.Tensor)
                and following < len(external) and external[following] < _last_read(node, order)
                and _bytes_of(node) <= sum(map(_bytes_of, _held_for(node)))):
            store_result(node)


def _is_external(node: fx.Node) -> bool:
    return _makes_values(node) and fusion_of(node) is Fusion.EXTERNAL


def _is_generated(node: fx.Node) -> bool:
    maker = node.args[0] if is_tuple_element(node) else node
    return _makes_values(maker) and fusion_of(maker) is not Fusion.EXTERNAL


def _makes_values(node: fx.Node) -> bool:
    return node.op == "call_function" and not _is_alias(node)


def _is_alias(node: fx.Node) -> bool:
    return is_view(node) or is_tuple_element(node)


def _last_read(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """Return the position of the last op that reads the node or a view of it; -1 if none does."""
    return max((order[user] for user in readers(node, _is_alias) if user.op != "output"),
               default=-1)


def _held_for(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that stay alive until a kernel reads this node, if it is not stored: inputs
    of the graph, results of libraries' kernels and of reductions, and stored results."""
    return operands(node.args[0] if is_tuple_element(node) else node, lambda source: (
        is_view(source) or (_makes_values(source) and not is_stored(source)
                            and fusion_of(source) is Fusion.POINTWISE)))


def _bytes_of(node: fx.Node) -> int:
    return sum(int(tensor.numel() * tensor.element_size())
               for tensor in tensors_of(node.meta.get("val")))
