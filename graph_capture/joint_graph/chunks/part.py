"""The parts of a step that can run in chunks: between two narrow frontiers, by rows.

The *widest part* begins at a wide matrix product of the forward, or at its result if that is
returned to the caller, and extends as far as ops act on rows (`rows`) and values of that width lie
between: from hidden states to the loss's sum, and back from the loss to gradients of hidden states
and weight.  The search uses only the structure of the ops.

The *inner parts* are wide insides of layers: MLPs and attention.  Each begins at the matrix
products that widen rows, in the forward and in the backward, and contains the connected values of
that width, with the ops that read them: from the residual stream before an MLP to the one behind
it, and the same way back.  The gradient comes from above, so forward and backward each run in their
own chunks, and the schedule decides what is kept for the backward and what is recomputed.
Attention outside of fused kernels is such a part: the rows of its scores are the queries of all
sequences and heads at once, so that these may share a mask or a bias; gradients of keys and values
are sums over the rows.

Blind spots: there is no inner part where something as wide is read outside, or where a random op is
inside, such as dropout in an MLP: nothing would be gained.  The same holds for the gradient of a
bias with as many elements as the scores (of one sequence, or of each).  Scores with the keys first,
one row for each key, have no rule: their softmax is over rows.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from planner._graph_capture.joint_graph.chunks.rows import (
    ADDING,
    CASTS,
    Action,
    Kind,
    Layout,
    Rows,
    action_of,
    by_rows,
    factors,
    pointwise_within,
)
from planner._graph_capture.joint_graph.joint import JointGraph, is_tuple_element, unviewed
from planner._graph_capture.joint_graph.walks import ancestors, descendants

_aten = torch.ops.aten
_AS_WIDE = 0.5
"""Minimum ratio of elements to those of the widest value for a value to be wide."""
_LEAST_ROWS = 2


@dataclass(frozen=True)
class Part:
    """Ops that run in chunks; those of the forward and of the backward are in order."""

    rows: int
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    layouts: Mapping[fx.Node, Layout]
    """Layouts of the part's results."""
    actions: Mapping[fx.Node, Action]
    """Actions of its ops; elements of tuples have none."""

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All ops of the part."""
        return self.forward + self.backward


def find_part(joint: JointGraph, returned: Set[fx.Node]) -> Part | None:
    """The part around the widest matrix product of the forward, if it can run in chunks;
    `returned`: values that the caller needs whole."""
    late = descendants(joint.cotangents)
    entry = max((node for node in joint.graph.nodes if node not in late
                 and node.target in (_aten.mm.default, _aten.addmm.default)),
                key=_elements, default=None)
    return None if entry is None else _part_from(
        joint, entry, {unviewed(node) for node in returned})


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


def _part_from(joint: JointGraph, entry: fx.Node, returned: Set[fx.Node]) -> Part | None:
    rows = int(entry.meta["val"].shape[0])
    if rows < _LEAST_ROWS:
        return None
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    layouts, actions = _with_wide_operands(joint, entry)
    wide = {node for node, layout in layouts.items() if isinstance(layout, Rows)
            and _elements(node) >= _AS_WIDE * _elements(entry)}
    before = ancestors(wide, layouts.__contains__)
    chosen = {node for node in descendants(wide, layouts.__contains__)
              if node in before or reads(node, wide)}
    chosen |= {node for node in layouts if _ends_a_sum(node, chosen, layouts)}
    given = {node for node in chosen if node in wide and unviewed(node) in returned}
    chosen -= ancestors(given, chosen.__contains__)  # the caller needs them whole
    early = ancestors(node for node in joint.forward_outputs if node is not None)
    ours = sorted(chosen, key=order.__getitem__)
    part = Part(rows, tuple(node for node in ours if node in early),
                tuple(node for node in ours if node not in early), layouts, actions)
    return part if is_possible(part, wide) else None


def _with_wide_operands(joint: JointGraph, entry: fx.Node
                        ) -> tuple[dict[fx.Node, Layout], dict[fx.Node, Action]]:
    """The actions of the ops that depend on `entry`, and of pointwise ops that make something as
    wide for them alone, such as the targets of a loss as rows of zeros and ones."""
    given: dict[fx.Node, Rows] = {}
    refused: set[fx.Node] = set()
    while True:
        layouts, actions = followed(joint, [entry], given)
        outside = {operand: layout for action in actions.values()
                   for operand, layout in action.operands.items()
                   if operand not in layouts and operand not in refused
                   and operand.op == "call_function" and isinstance(layout, Rows)
                   and _elements(operand) >= _AS_WIDE * _elements(entry)
                   and pointwise_within(operand, layout) is not None}
        if outside:
            given |= outside
            continue
        read_elsewhere = {node for node in given if not layouts.keys() >= node.users.keys()}
        if not read_elsewhere:
            return layouts, actions
        refused |= read_elsewhere
        given = {}


def followed(joint: JointGraph, entries: Collection[fx.Node],
             given: Mapping[fx.Node, Rows] | None = None
             ) -> tuple[dict[fx.Node, Layout], dict[fx.Node, Action]]:
    """The actions of these matrix products, and of the ops that depend on them, on rows, as far as
    they have any; `given`: rows of the results of pointwise ops that depend on none of them."""
    given = given or {}
    late = descendants(joint.cotangents)
    layouts: dict[fx.Node, Layout] = {}
    actions: dict[fx.Node, Action] = {}

    def known_to(node: fx.Node, operand: fx.Node) -> Layout | None:
        layout = layouts.get(operand)
        # A sum of the forward is complete when the backward reads it.
        return None if layout is Kind.SUM and node in late and operand not in late else layout

    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        if is_tuple_element(node):
            if node.args[0] in actions:
                layouts[node] = actions[node.args[0]].results[node.args[1]]
            continue
        action: Action | None = None
        if node in given:
            action = pointwise_within(node, given[node])
        elif any(operand in layouts for operand in node.all_input_nodes):
            action = action_of(node, partial(known_to, node))
        elif node in entries:
            action = by_rows(node)
        if action is not None and _can_be_cut(action, layouts):
            actions[node] = action
            layouts[node] = action.results[0] if len(action.results) == 1 else Kind.WHOLE
    return layouts, actions


def _can_be_cut(action: Action, layouts: Mapping[fx.Node, Layout]) -> bool:
    """True if chunks of values from outside can be views."""
    for operand, layout in action.operands.items():
        if operand not in layouts and isinstance(layout, Rows):
            value = operand.meta["val"]
            merged = value.stride()[layout.start:layout.stop]
            sizes = value.shape[layout.start:layout.stop]
            expected = merged[-1]
            for size, stride in zip(reversed(sizes), reversed(merged), strict=True):
                if size != 1 and stride != expected:
                    return False
                expected = stride * size
    return True


def reads(node: fx.Node, wide: set[fx.Node]) -> bool:
    """True if an op, or the op that it is an element of, reads something wide."""
    source = node.args[0] if is_tuple_element(node) else node
    return any(operand in wide for operand in source.all_input_nodes)


def _ends_a_sum(node: fx.Node, chosen: set[fx.Node], layouts: Mapping[fx.Node, Layout]) -> bool:
    """True if a node is on the way, by views, from a sum that the part makes to a cast of it; then
    the results of the cast are added up."""
    is_cast, found = False, False
    for user in _only_readers(node):
        is_cast |= user.target in CASTS and layouts.get(user) is Kind.SUM
    while layouts.get(node) is Kind.SUM and not is_tuple_element(node):
        is_cast |= node.target in CASTS
        source = node.all_input_nodes[0]
        if len(node.all_input_nodes) != 1 or len(source.users) != 1:
            return False
        if source in chosen:
            found = layouts[source] is Kind.SUM
            break
        node = source
    return found and is_cast


def _only_readers(node: fx.Node) -> list[fx.Node]:
    """The reader of a node, the reader of that, and so on, while each has only one."""
    found: list[fx.Node] = []
    while len(node.users) == 1:
        node = next(iter(node.users))
        found.append(node)
    return found


def is_possible(part: Part, wide: set[fx.Node]) -> bool:
    """True if each half can run in one go, with all its operands made before."""
    if not part.backward or not wide.intersection(part.nodes):
        return False
    for half in (part.forward, part.backward):
        ours = set(half)
        if not ours:
            continue
        outside = {user for node in ours for user in node.users if user not in ours}
        if ours & descendants(outside):
            return False
    return all(node.target is operator.getitem or node in part.actions for node in part.nodes)


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
