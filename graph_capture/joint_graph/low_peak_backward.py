"""A backward that uses less memory, for the price of some copies.

The gradient of a concatenation is one tensor, and each operand's gradient is a view of it.  A part
that is read late keeps the whole alive until then (a U-Net adds the skip's half only when the
backward has come down to the depth where the skip began).  Here such parts are copied as soon as
the whole is made, and the whole is freed after the last read of its other parts.

The backward of a max pooling reads only the shape of its input: the saved positions of the maxima
determine where the gradient goes.  If its result is added to a gradient of the same layout, that
gradient replaces the input, which need not be saved or recomputed for its shape.

Values are bitwise the same.  Copies take time, so a plan uses them only where they pay.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from planner._graph_capture.joint_graph.inplace import same_layout
from planner._graph_capture.joint_graph.joint import (
    Emitter,
    JointGraph,
    is_tuple_element,
    is_view,
)
from planner._graph_capture.joint_graph.walks import descendants, readers
from planner._graph_capture.torch_compat.dispatch import define_op

_LARGEST_SHARE = 0.5
"""Parts that are read late are copied if they are at most this share of the whole."""
_LEAST_OPS = 4
"""Minimum number of ops between the last read of the other parts and that of the late parts; in
fewer, little is made that could use the memory."""

_POOL_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default
_POOL_INPUT = 1
"""Position of the argument of which only the shape is read."""


def lower_backward_peak(joint: JointGraph, *, compiled: bool = False) -> None:
    """Copy late parts of gradients, and let gradients replace inputs of poolings; `compiled`: by
    Inductor."""
    graph = joint.graph
    target = REALIZED_COPY if compiled else torch.ops.aten.clone.default
    for part in late_parts(joint):
        copy = Emitter(graph, part.next)(target, part, like=part)
        part.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    order = {node: position for position, node in enumerate(graph.nodes)}
    for pooling in graph.find_nodes(op="call_function", target=_POOL_BACKWARD):
        other = _other_summand(pooling)
        if other is not None and order[other] < order[pooling] and same_layout(
                other.meta["val"], pooling.args[_POOL_INPUT].meta["val"]):
            pooling.update_arg(_POOL_INPUT, other)


def late_parts(joint: JointGraph) -> list[fx.Node]:
    """Views of a part of a gradient whose copies would let the whole be freed early."""
    output = joint.output
    in_backward = descendants(joint.cotangents) - set(joint.cotangents)
    order = {node: position for position, node in enumerate(
        node for node in joint.graph.nodes if not _is_alias(node) and not is_tuple_element(node))}
    found: list[fx.Node] = []
    for node in joint.graph.nodes:
        whole = node.meta.get("val")
        if (node not in in_backward or _is_alias(node) or not isinstance(whole, torch.Tensor)
                or len(node.users) < 2):
            continue
        reads = {user: readers(user, _is_alias) if _is_alias(user) else {user}
                 for user in node.users}
        # Outputs of the backward stay alive to its end, whoever else reads them.
        if all(nodes and output not in nodes for nodes in reads.values()):
            found += _worth_copying(whole, {
                user: max(map(order.__getitem__, nodes)) for user, nodes in reads.items()})
    return found


def _worth_copying(whole: torch.Tensor, last_read: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The direct users of a whole that are read late and together small enough."""
    users = sorted(last_read, key=last_read.__getitem__)
    for count in range(1, len(users)):
        late = users[count:]
        if (all(_is_alias(user) and isinstance(user.meta["val"], torch.Tensor) for user in late)
                and last_read[late[0]] - last_read[users[count - 1]] >= _LEAST_OPS
                and sum(part.numel() * part.element_size()
                        for part in (user.meta["val"] for user in late))
                <= _LARGEST_SHARE * whole.untyped_storage().nbytes()):
            return late
    return []


def _is_alias(node: fx.Node) -> bool:
    """True if the node is a view, or one of several that an op makes at once."""
    return is_view(node.args[0] if is_tuple_element(node) else node)


def _other_summand(node: fx.Node) -> fx.Node | None:
    """The other summand if the node's result is only added to something."""
    if len(node.users) != 1:
        return None
    total = next(iter(node.users))
    if total.target is not torch.ops.aten.add.Tensor or len(total.args) != 2:
        return None
    other = total.args[1] if total.args[0] is node else total.args[0]
    return other if isinstance(other, fx.Node) and other is not node else None


# With the tag the operand may be a view of any layout: Inductor does not copy it into another
# first.
REALIZED_COPY = define_op("realized_copy", "(Tensor part) -> Tensor", torch.clone,
                          tags=(torch.Tag.flexible_layout,))
"""`realized_copy(part)`: a dense copy of `part` with strides in the same order.  Inductor would
make `aten.clone` a part of its reader and keep the whole alive until that runs; it calls an op
unknown to it as it is."""
