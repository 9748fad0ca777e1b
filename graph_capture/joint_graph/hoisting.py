"""Ops at the end of a joint graph, or in its backward, that belong to the forward.

Inductor's partitioner is a minimum cut between the values of the forward and the needs of the
backward.  It may save the result of an op that stands in the backward although no gradient flows
into it (the inverse deviation over the width, in the backward of a normalization).  Such ops are
hoisted into the forward, so that their results can be saved.  The choice depends on sizes, so a
plan for several sizes keeps the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from planner._graph_capture.joint_graph.joint import JointGraph, is_cotangent
from planner._graph_capture.joint_graph.lower import last_forward_node
from planner._graph_capture.joint_graph.walks import ancestors, descendants, sources


def saved_by_default(joint: JointGraph) -> frozenset[str]:
    """Names of the nodes that Inductor's own partitioner saves for the backward."""
    from planner._graph_capture.torch_compat.inductor import chosen_by_default

    num_outputs = len(joint.forward_outputs)
    graph, chosen = chosen_by_default(joint.copy(), num_outputs)
    saved = frozenset(chosen)
    returned: Any = graph.output_node().args[0]
    written = descendants(filter(is_cotangent, graph.find_nodes(op="placeholder")),
                          lambda node: node not in saved)
    made_late = [node for node in returned[num_outputs:] if isinstance(node, fx.Node)]
    made_late += [node for node in written if node.op != "output" and node.is_impure()]
    return frozenset(node.name for node in sources(made_late, saved.__contains__))


def ops_to_hoist(joint: JointGraph, saved: frozenset[str]) -> tuple[int, ...]:
    """Positions in the graph of the ops in the backward that compute `saved`."""
    last = last_forward_node(joint)
    if last is None:
        return ()
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    late = descendants((last, *joint.cotangents))
    movable = {node for node in joint.graph.nodes if node.op not in ("placeholder", "output")
               and node not in late and order[node] > order[last]}
    chosen = ancestors((node for node in movable if node.name in saved), movable.__contains__)
    return tuple(sorted(map(order.__getitem__, chosen)))


def hoist(joint: JointGraph, positions: Sequence[int]) -> None:
    """Move the ops at these positions to the end of the forward, if their operands are there: in
    another graph than the positions are for, any op may stand at them."""
    last = last_forward_node(joint)
    if last is None:
        return
    nodes = list(joint.graph.nodes)
    there = {*nodes[:nodes.index(last)], *joint.primals}
    for position in positions:
        if position < len(nodes) and there.issuperset(nodes[position].all_input_nodes):
            last.prepend(nodes[position])
            there.add(nodes[position])


def hoist_updates(joint: JointGraph) -> None:
    """Move updates of inputs (BatchNorm's running statistics), with the ops that compute them, from
    the end of the graph to the end of the forward.

    An update moves only if nothing else reads the old value: a recomputation would read the new
    one.
    """
    last = last_forward_node(joint)
    if last is None:
        return
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    late = descendants((last, *joint.cotangents))
    for update in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if (order[update] > order[last] and update not in late
                and update.args[0] in joint.primals and _is_only_updated(update)):
            for node in sorted(ancestors((update,), lambda node: node.op != "placeholder"),
                               key=order.__getitem__):
                if order[node] > order[last]:
                    last.prepend(node)


def _is_only_updated(update: fx.Node) -> bool:
    """True if all values computed from an input go into its update."""
    others = descendants(update.args[0].users, lambda node: node is not update)
    return all(node.op != "output" and node.users for node in others)
