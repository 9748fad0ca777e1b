"""Results of dropouts recomputed in the backward from operand and mask.

With torch's own random numbers, Inductor runs a dropout as one library call, which returns its
result and the mask.  The backward needs the mask, a byte for each element, and often the result, as
the operand of a matrix product.  Then result and operand are both saved, or the whole dropout runs
again.  The product of operand, mask and scale gives the same values, draws nothing, and fuses with
its neighbours.

Blind spots: ops of the forward that run again read the result itself, and the dropout runs again
with them; where the mask is drawn again, the product is made in addition to the result that comes
with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from planner._graph_capture.joint_graph.joint import JointGraph, is_tuple_element, is_view
from planner._graph_capture.joint_graph.lower import last_forward_node

_DROPOUT = torch.ops.aten.native_dropout.default


def recompute_dropout(joint: JointGraph) -> None:
    """Let the backward read operand × mask × scale in place of results of dropouts."""
    last = last_forward_node(joint)
    if last is None:
        return
    order = {node: position for position, node in enumerate(joint.graph.nodes)}
    for node in joint.graph.find_nodes(op="call_function", target=_DROPOUT):
        elements = {user.args[1]: user for user in node.users if is_tuple_element(user)}
        if elements.keys() == {0, 1} and node.args[2] is True and node.args[1] < 1:
            _Recomputed(joint.graph, node, elements[0], elements[1], order, order[last]).run()


class _Recomputed:
    """One dropout, and the nodes made for it in the backward."""

    def __init__(self, graph: fx.Graph, dropout: fx.Node, result: fx.Node, mask: fx.Node,
                 order: dict[fx.Node, int], end_of_forward: int) -> None:
        self.graph, self.dropout, self.result, self.mask = graph, dropout, result, mask
        self.order, self.end = order, end_of_forward
        self.made: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        reads = [(value, user) for value in self._names(self.result) for user in value.users
                 if user.op != "output" and self.order.get(user, 0) > self.end]
        if not reads or not any(self.order.get(user, 0) > self.end for user in self.mask.users):
            return
        first = min((user for _, user in reads), key=self.order.__getitem__)
        with self.graph.inserting_before(first):
            for value, user in reads:
                user.replace_input_with(value, self._anew(value))

    def _names(self, value: fx.Node) -> Iterator[fx.Node]:
        """The value and its views in the forward."""
        yield value
        for user in value.users:
            if is_view(user) and self.order.get(user, self.end) <= self.end:
                yield from self._names(user)

    def _anew(self, value: fx.Node) -> fx.Node:
        if value not in self.made:
            if value is self.result:
                self.made[value] = self._product()
            else:
                self.made[value] = self._call(value.target, *(
                    self._anew(value.all_input_nodes[0]) if arg is value.all_input_nodes[0]
                    else arg for arg in value.args))
        return self.made[value]

    def _product(self) -> fx.Node:
        operand, probability = self.dropout.args[:2]
        mask = self._call(torch.ops.prims.convert_element_type.default, self.mask,
                          operand.meta["val"].dtype)
        kept = self._call(torch.ops.aten.mul.Tensor, operand, mask)
        return self._call(torch.ops.aten.mul.Tensor, kept, 1 / (1 - probability))

    def _call(self, target: Any, *args: Any) -> fx.Node:
        new = self.graph.call_function(target, args)
        new.meta = {key: value for key, value in self.dropout.meta.items()
                    if key in ("nn_module_stack", "stack_trace", "seq_nr")}
        with self.mask.meta["val"].fake_mode:
            new.meta["val"] = target(*fx.map_arg(args, lambda node: node.meta["val"]))
        return new
