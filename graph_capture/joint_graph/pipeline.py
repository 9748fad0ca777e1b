"""The only path from a captured joint graph to the region that is planned and executed.

A plan names ops as they are after the rewriting, so capture and the backend must rewrite by the
same steps in the same order.  Only this module calls these steps: clean, add gradients as autocast
does (eager backend), run a part in chunks, make results fresh (eager backend), copy late parts of
gradients (low-peak variant), hoist updates and recompute dropouts (Inductor), hoist, lower.

Inductor's partitioner is a minimum cut between the values of the forward and the needs of the
backward.  It may save the result of an op that stands in the backward although no gradient flows
into it (the inverse deviation over the width, in the backward of a normalization).  Such ops are
hoisted into the forward, so that their results can be saved.  The choice depends on sizes, so a
plan for several sizes keeps the list.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from planner._graph_capture.joint_graph.autocast_gradients import add_gradients_as_autocast_does
from planner._graph_capture.joint_graph.chunks.chunked import Chunked, run_in_chunks
from planner._graph_capture.joint_graph.fresh_results import make_results_fresh
from planner._graph_capture.joint_graph.joint import (
    JointGraph,
    clean_joint_graph,
    is_cotangent,
    is_number,
)
from planner._graph_capture.joint_graph.low_peak_backward import late_parts, lower_backward_peak
from planner._graph_capture.joint_graph.lower import LoweredRegion, last_forward_node, lower
from planner._graph_capture.joint_graph.recomputed_dropout import recompute_dropout
from planner._graph_capture.joint_graph.symbolic_sizes import Sizes
from planner._graph_capture.joint_graph.walks import ancestors, descendants, sources


@dataclass(frozen=True, slots=True)
class JointVariant:
    """The variant into which a joint graph is rewritten."""

    compiled: bool = False
    """For Inductor to compile; otherwise it runs op by op."""
    low_peak: bool = False
    """The backward uses less memory at the price of copies, see `low_peak_backward`."""
    chunks: int = 1
    """Number of chunks in which its widest part runs, see `chunks.chunked`."""
    inner_chunks: int = 1
    """Number of chunks in which the insides of layers run, see `chunks.part`."""


LoweredGraphs = dict[tuple[object, ...], LoweredRegion]
"""Earlier results of lowering one joint graph, by arguments."""


def lower_joint_graph(
    module: fx.GraphModule, num_forward_outputs: int, variant: JointVariant, *,
    cotangents: Sequence[bool], input_names: Sequence[str | None],
    hoisted: tuple[int, ...] | None = None, region: int = 0, block: str = "",
    elided: Collection[int] = (), known: LoweredGraphs | None = None,
) -> LoweredRegion:
    """The region, the step's `region`-th, of a joint graph in one variant; `module` is not changed.

    `cotangents`: true for the differentiable outputs that receive a gradient.  `input_names`: names
    of the parameters and buffers among the inputs, `None` for any other.  `hoisted`: the ops that a
    plan for Inductor has moved to the forward; `None` chooses them.  `elided`: outputs of the
    forward that nobody reads, which may be elided if they are made in chunks.  `block`: the
    submodule of the graph, empty for the whole model.  `known`: is added to, and made use of.
    """
    key = (region, block, variant, tuple(cotangents), None if hoisted is None else tuple(hoisted),
           tuple(elided))
    if known is not None and key in known:
        return known[key]
    joint = clean_joint_graph(module, num_forward_outputs, cotangents)
    if not variant.compiled:
        joint = add_gradients_as_autocast_does(joint, module.graph)
    cut = Chunked(joint, 1, 1, ())
    if variant.chunks > 1:
        cut = run_in_chunks(joint, variant.chunks, elided, variant.inner_chunks,
                            compiled=variant.compiled)
        joint = cut.joint
    if not variant.compiled:
        joint = make_results_fresh(joint)
    if variant.low_peak:
        lower_backward_peak(joint, compiled=variant.compiled)
    saved: frozenset[str] = frozenset()
    if variant.compiled:
        hoist_updates(joint)
        recompute_dropout(joint)
        if hoisted is None:
            saved = saved_by_default(joint)
            hoisted = ops_to_hoist(joint, saved)
        hoist(joint, hoisted)
    Sizes.of(joint.primals).settle(joint.graph)
    joint = joint.described_anew()  # a size may be among the outputs
    lowered = lower(joint, _stable_names(input_names, joint), region, block)
    lowered = replace(lowered, hoisted=hoisted or (), saved_by_default=saved,
                      chunks=cut.chunks, inner_chunks=cut.inner_chunks, elided=cut.elided)
    if known is not None:
        known[key] = lowered
    return lowered


def has_low_peak_variant(region: LoweredRegion) -> bool:
    """True if a region's backward has parts to copy."""
    return bool(late_parts(region.joint))


def _stable_names(known: Sequence[str | None], joint: JointGraph) -> list[str]:
    """Parameters and buffers by their qualified name, other inputs (`None`) numbered in order;
    numbers, which are constants in other graphs, do not count."""
    found, others = [], 0
    for name, primal in zip(known, joint.primals, strict=True):
        if name is None and is_number(primal):
            name = "number"
        elif name is None:
            name = f"input:{others}"
            others += 1
        found.append(name)
    return found


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
