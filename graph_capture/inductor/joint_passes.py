"""A joint graph as Inductor's own partitioner would divide it.

That partitioner is a minimum cut between what the forward has and what the backward needs, and what
it saves may be computed by an op that stands in the backward, though no gradient flows into it (the
inverse deviation over the width, in the backward of a normalization).  Such ops belong to the
forward here, so that their results can be saved.  Which ones depends on sizes; a plan that is to
serve several sizes keeps the list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graph_capture.inductor.remade_dropout import remake_dropout
from graph_capture.joint_graph.joint import JointGraph
from graph_capture.joint_graph.lower import last_forward_node


def saved_by_default(joint: JointGraph) -> frozenset[str]:
    """Names of the nodes that Inductor's own partitioner saves for the backward."""
    from graph_capture.torch_compat.inductor import default_saved_names

    return frozenset(default_saved_names(joint.copy(), len(joint.forward_outputs)))


def backward_ops_to_save(joint: JointGraph, saved: frozenset[str]) -> tuple[int, ...]:
    """The ops that make `saved`, and what they need, where they stand in the backward: their
    positions in the graph."""
    last = last_forward_node(joint)
    if last is None:
        return ()
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    late = _late(joint, last)
    movable = {node for node in joint.graph.nodes if node.op not in ("placeholder", "output")
               and node not in late and order[node] > order[last]}
    wanted = [node for node in movable if node.name in saved]
    chosen: set[fx.Node] = set()
    while wanted:
        node = wanted.pop()
        if node in movable and node not in chosen:
            chosen.add(node)
            wanted.extend(node.all_input_nodes)
    return tuple(sorted(map(order.__getitem__, chosen)))


def rearrange(joint: JointGraph) -> None:
    """What is done to a joint graph before it is planned for, or lowered by a plan for, Inductor;
    `move_to_forward` comes after it."""
    _update_in_forward(joint)
    remake_dropout(joint)


def _update_in_forward(joint: JointGraph) -> None:
    """Move updates of inputs (BatchNorm's running statistics) from the end of the graph, where they
    stand, to the end of the forward, with what they are computed by.

    Only where nothing else reads the old value: a recomputation would read the new one.
    """
    last = last_forward_node(joint)
    if last is None:
        return
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    late = _late(joint, last)
    for update in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if (order[update] > order[last] and update not in late
                and update.args[0] in joint.primals and _is_only_updated(update)):
            for node in sorted(_needed(update), key=order.__getitem__):
                if order[node] > order[last]:
                    last.prepend(node)


def _late(joint: JointGraph, last: fx.Node) -> set[fx.Node]:
    """What the backward computes from gradients, or is only to be had after the whole forward, of
    which `last` is the last op."""
    late = {last, *joint.cotangents}
    for node in joint.graph.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def _is_only_updated(update: fx.Node) -> bool:
    """Whether all that is computed from an input goes into its update."""
    pending, seen = list(update.args[0].users), set()
    while pending:
        node = pending.pop()
        if node is update or node in seen:
            continue
        if node.op == "output" or not node.users:
            return False
        seen.add(node)
        pending.extend(node.users)
    return True


def _needed(node: fx.Node) -> set[fx.Node]:
    """A node and what it is computed from, without inputs."""
    pending, found = [node], set()
    while pending:
        source = pending.pop()
        if source not in found and source.op != "placeholder":
            found.add(source)
            pending.extend(source.all_input_nodes)
    return found


def move_to_forward(joint: JointGraph, positions: Sequence[int]) -> None:
    """Move the ops at these positions of the graph to the end of the forward, as far as what they
    read is there: of another graph than the positions are for, anything may stand at them."""
    last = last_forward_node(joint)
    if last is None:
        return
    nodes = list(joint.graph.nodes)
    there = {*nodes[:nodes.index(last)], *joint.primals}
    for position in positions:
        if position < len(nodes) and there.issuperset(nodes[position].all_input_nodes):
            last.prepend(nodes[position])
            there.add(nodes[position])
