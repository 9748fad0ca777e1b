"""The wide insides of layers that can run in chunks: MLPs and attention, between narrow frontiers.

Each begins at the matrix products that widen rows, in the forward and in the backward, and contains
the connected values of that width, with the ops that read them: from the residual stream before an
MLP to the one behind it, and the same way back.  The gradient comes from above, so forward and
backward cannot run together as they do for a loss (`part`): each runs in its own chunks, and the
schedule decides what is kept for the backward and what is recomputed.

Attention outside of fused kernels is such a part: a product of batches of matrices makes its
scores, a row for each query, which is wide where there are many keys.  Its rows are the queries of
all sequences and heads at once, so that these may share a mask or a bias; gradients of keys and
values are sums over the rows.

Blind spots: there is no part where something as wide is read outside, or where a random op is
inside, such as dropout in an MLP: nothing would be gained.  The same holds for the gradient of a
bias with as many elements as the scores (of one sequence, or of each).  Scores with the keys first,
one row for each key, have no rule: their softmax is over rows.
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
"""Minimum ratio of a product's row width to that of its operand."""


def find_inner_parts(joint: JointGraph, returned: Set[fx.Node], taken: Set[fx.Node]) -> list[Part]:
    """Parts between frontiers at most half as wide, without the `taken` nodes."""
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    early = ancestors(node for node in joint.forward_outputs if node is not None)
    whole = {unviewed(node) for node in returned}
    found: list[Part] = []
    gone = set(taken)
    # The rows of matrices are batch and sequence; those of batched matrices are the sequence.
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
    """True if a matrix product makes rows wider."""
    left, _ = factors(node)
    (rows, width), inside = node.meta["val"].shape[-2:], left.meta["val"].shape[-1]
    return rows > 1 and width >= _WIDENS * inside


def _width(node: fx.Node, layouts: dict[fx.Node, Layout]) -> float:
    """Elements per row of a node; 0 if it has no rows."""
    layout, value = layouts.get(node), node.meta.get("val")
    if not isinstance(layout, Rows) or not isinstance(value, torch.Tensor):
        return 0
    return value.numel() / layout.count(value.shape)


def _connected(entries: list[fx.Node], layouts: dict[fx.Node, Layout]
               ) -> Iterator[set[fx.Node]]:
    """For each entry not in an earlier set, the connected nodes that are more than half as wide."""
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
    """The wide nodes of one half of the step, the nodes between them, and their readers."""
    mine = wide.union(*(node.users for node in wide)) & half
    before = ancestors(wide, half.__contains__)
    return {node for node in descendants(mine, half.__contains__)
            if node in before or reads(node, wide)}
