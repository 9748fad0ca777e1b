"""A joint graph as Inductor's own partitioner would divide it.

That partitioner is a minimum cut between what the forward has and what the backward needs, and what
it saves may be computed by an op that stands in the backward, though no gradient flows into it (the
inverse deviation over the width, in the backward of a normalization).  Such ops belong to the
forward here, so that their results can be saved.  Which ones depends on sizes; a plan that is to
serve several sizes keeps the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from graph_capture.joint import JointGraph
from graph_capture.lower import LoweredRegion, last_forward_node
from graph_capture.replay import Replay


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
    return tuple(sorted(map(order.__getitem__, chosen)))


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


def without_replayed_randomness(lowered: LoweredRegion) -> LoweredRegion:
    """Random ops run once: no generator's state is kept for compiled code.  What Inductor computes
    from a seed is not random in this sense."""
    return replace(lowered, ops=tuple(
        replace(op, replay=Replay(pinned="random numbers are drawn once"))
        if op.replay.random else op for op in lowered.ops))
