"""Gradients of a weight that autocast casts once and a step uses several times.

Autocast keeps the cast of a weight until its context ends: the gradients of all uses are added in
the dtype of the cast, and their sum is cast back.  While it traces, torch keeps none, so that a
traced step casts each gradient and adds them in float32.  Here they are added as the plain step
does, in the same order.

Blind spot: a weight that is used in two outermost autocast contexts of one graph, each of which
has a cast of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx

from planner._graph_capture.joint_graph.joint import Emitter, JointGraph, eliminate_dead_code

_aten = torch.ops.aten
_CASTS = frozenset({"to", "bfloat16", "half", "type", "type_as"})
"""Methods of tensors, which a model's code calls itself."""


def add_gradients_as_autocast_does(joint: JointGraph, traced: fx.Graph) -> JointGraph:
    """Add gradients of a clean joint graph in the dtype of the weight's cast.  `traced`: the graph
    before it was cleaned, which has the cast of each use."""
    uses = {primal.name: {user.meta["seq_nr"] for user in primal.users
                          if user.target is _aten._to_copy.default and "seq_nr" in user.meta
                          and not _is_explicit(user)}
            for primal in traced.find_nodes(op="placeholder") if len(primal.users) > 1}
    again = [(gradient, uses[primal.name]) for primal, gradient
             in zip(joint.primals, joint.gradients, strict=True)
             if gradient is not None and len(uses.get(primal.name, ())) > 1]
    for gradient, casts in again:
        _add_before_cast(joint.graph, gradient, casts)
    if not again:
        return joint
    eliminate_dead_code(joint.graph)
    return joint.described_anew()


def _is_explicit(cast: fx.Node) -> bool:
    calls = cast.meta.get("source_fn_stack")
    return bool(calls) and calls[-1][1] in _CASTS


def _add_before_cast(graph: fx.Graph, gradient: fx.Node, uses: Collection[int]) -> None:
    """`uses`: sequence numbers of the casts of the weight."""
    parts = list(_parts(gradient))
    casts = {part for part, _ in parts
             if part.target is _aten._to_copy.default and part.meta.get("seq_nr") in uses
             and part.args[0].meta["val"].dtype in (torch.bfloat16, torch.float16)}
    if len(casts) < 2:
        return
    left = len(casts)
    uncast: fx.Node | None = None
    total: fx.Node | None = None
    for part, place in parts:
        emit = Emitter(graph, place)
        addend: fx.Node | None = part
        if part in casts:
            left -= 1
            operand = part.args[0]
            uncast = operand if uncast is None else emit(
                _aten.add.Tensor, uncast, operand, like=place)
            addend = None if left else emit(
                _aten._to_copy.default, uncast, like=part, **part.kwargs)
        if addend is not None:
            total = addend if total is None else emit(_aten.add.Tensor, total, addend, like=place)
    assert total is not None
    gradient.replace_all_uses_with(total)


def _parts(total: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The addends of a sum in their order, each with the op that adds it."""
    additions = []
    while (total.target is _aten.add.Tensor and not total.kwargs and len(total.users) == 1
           and all(isinstance(operand, fx.Node) for operand in total.args)):
        additions.append(total)
        total = total.args[0]
    if additions:
        yield total, additions[-1]
    for addition in reversed(additions):
        yield addition.args[1], addition
