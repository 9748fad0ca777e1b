"""A joint graph as Inductor's own partitioner would divide it.

That partitioner is a minimum cut between what the forward has and what the backward needs, and what
it saves may be computed by an op that stands in the backward, though no gradient flows into it (the
inverse deviation over the width, in the backward of a normalization).  Such ops belong to the
forward here, so that their results can be saved.
"""

from __future__ import annotations

from torch import fx

from graph_capture.joint import JointGraph
from graph_capture.lower import last_forward_node


def saved_by_default(joint: JointGraph) -> frozenset[str]:
    """Names of the nodes that Inductor's own partitioner saves for the backward."""
    from graph_capture.torch_compat.inductor import default_saved_names

    return frozenset(default_saved_names(joint.copy(), len(joint.forward_outputs)))


def move_saved_to_forward(joint: JointGraph, saved: frozenset[str]) -> None:
    """Move the ops that make `saved`, and what they need, to the end of the forward where they
    stand in the backward."""
    last = last_forward_node(joint)
    if last is None:
        return
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    late: set[fx.Node] = set()  # in the backward, or only to be had after the whole forward
    movable: set[fx.Node] = set()
    for node in joint.graph.nodes:
        is_op = node.op not in ("placeholder", "output")
        if node in joint.cotangents or node is last or (
                is_op and not late.isdisjoint(node.all_input_nodes)):
            late.add(node)
        elif is_op and order[node] > order[last]:
            movable.add(node)
    wanted = [node for node in movable if node.name in saved]
    chosen: set[fx.Node] = set()
    while wanted:
        node = wanted.pop()
        if node in movable and node not in chosen:
            chosen.add(node)
            wanted.extend(node.all_input_nodes)
    for node in sorted(chosen, key=order.__getitem__):
        last.prepend(node)
