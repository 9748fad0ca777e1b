"""The wide insides of layers that can run in chunks: MLPs and attention, between narrow frontiers.

Each begins at the matrix products that make rows wider, in the forward and in the backward, and
holds what is as wide and connected with them, with the ops that read it: from the residual stream
before an MLP to the one behind, and the same way back.  The gradient comes from above, so forward
and backward cannot run together, as they do for a loss (`part`): each runs in chunks of its own,
and the schedule decides what of a chunk is kept for the backward and what is computed again.

Attention outside of fused kernels is such a part: its scores, a row for each query, are made by a
product of batches of matrices, and so wide where there are many keys.  Its rows are the queries, of
all sequences and heads at once, so that a mask or a bias may be shared by either; gradients of keys
and values are sums over them.

Blind spots: where something as wide is read outside, or a random op stands between, as dropout
inside of an MLP, nothing is gained and there is no part.  So it is with the gradient of a bias with
as many elements as the scores (that of one sequence alone, or of each).  Scores with the keys
first, one row for each, have no rule behind them: their softmax is over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
from torch import fx

from planner._graph_capture.joint_graph.chunks.part import (
    Part,
    followed,
    is_possible,
    reads,
    unviewed,
)
from planner._graph_capture.joint_graph.chunks.rows import ADDING, Layout, Rows, factors
from planner._graph_capture.joint_graph.joint import JointGraph
from planner._graph_capture.joint_graph.walks import ancestors, descendants

_WIDENS = 2
"""How many times as wide as its operand's the rows of a product must be."""


def find_inner_parts(joint: JointGraph, returned: Set[fx.Node], taken: Set[fx.Node]) -> list[Part]:
    """Parts between frontiers at most half as wide, without the nodes that are `taken`."""
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    early = ancestors(node for node in joint.forward_outputs if node is not None)
    whole = {unviewed(node) for node in returned}
    found: list[Part] = []
    gone = set(taken)
    # The rows of matrices are the batch and the sequence, those of batches of them the sequence.
    for products in ADDING.items():
        entries = [node for node in order if node.target in products and node not in gone
                   and _widens(node)]
        layouts, actions = followed(joint, entries) if entries else ({}, {})
        forward, backward = layouts.keys() & early, layouts.keys() - early
        for wide in _connected(entries, layouts):
            chosen = _with_readers(wide, forward) | _with_readers(wide, backward)
            if chosen & gone or any(unviewed(node) in whole for node in wide) or any(
                    user not in chosen for node in wide for user in node.users):
                continue
            ours = sorted(chosen, key=order.__getitem__)
            rows = next(layout.count(node.meta["val"].shape) for node in ours
                        if isinstance(layout := layouts[node], Rows))
            part = Part(rows, tuple(node for node in ours if node in early),
                        tuple(node for node in ours if node not in early), layouts, actions)
            if part.forward and is_possible(part, wide):
                found.append(part)
                gone |= chosen
    return found


def _widens(node: fx.Node) -> bool:
    """Whether a matrix product makes rows wider."""
    left, _ = factors(node)
    (rows, width), inside = node.meta["val"].shape[-2:], left.meta["val"].shape[-1]
    return rows > 1 and width >= _WIDENS * inside


def _width(node: fx.Node, layouts: dict[fx.Node, Layout]) -> float:
    """Elements of each of its rows; 0 where it has none."""
    layout, value = layouts.get(node), node.meta.get("val")
    if not isinstance(layout, Rows) or not isinstance(value, torch.Tensor):
        return 0
    return value.numel() / layout.count(value.shape)


def _connected(entries: list[fx.Node], layouts: dict[fx.Node, Layout]
               ) -> Iterator[set[fx.Node]]:
    """For each entry that is in none so far, what is connected with it and half as wide or more."""
    seen: set[fx.Node] = set()
    for entry in entries:
        if entry in seen or not _width(entry, layouts):
            continue
        least = _width(entry, layouts) / 2
        wide, pending = set(), [entry]
        while pending:
            node = pending.pop()
            if node not in wide and _width(node, layouts) > least:
                wide.add(node)
                pending += [*node.users, *node.all_input_nodes]
        seen |= wide
        yield wide


def _with_readers(wide: set[fx.Node], half: Set[fx.Node]) -> set[fx.Node]:
    """Of one half of the step, what is wide, what lies between, and what reads it."""
    mine = wide.union(*(node.users for node in wide)) & half
    before = ancestors(wide, half.__contains__)
    return {node for node in descendants(mine, half.__contains__)
            if node in before or reads(node, wide)}
