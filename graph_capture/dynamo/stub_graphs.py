"""Stub graphs that replace the compiled forward and backward of a joint graph while its step is
recorded.

They contain only the inputs, the outputs and the saved values, computed by placeholder ops, since
AOTAutograd reads nothing else.  Calls return results of the right shapes and save what an unplanned
step would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from planner._graph_capture.fake_copies.storage_less import (
    StorageLessMode,
    storage_less_storage,
    storage_less_tensor,
)
from planner._graph_capture.joint_graph.joint import is_cotangent
from planner._graph_capture.joint_graph.walks import ancestors, descendants, sources
from planner._graph_capture.torch_compat import (
    TorchDispatchMode,
    no_active_modes,
    split_joint_graph,
)


def stub_graphs(joint: fx.GraphModule, num_forward_outputs: int
                  ) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Stub forward and backward with the inputs and outputs of the joint graph; they save all that
    the backward reads."""
    outputs: list[Any] = list(joint.graph.output_node().args[0])
    crosses = dict.fromkeys(crossing(joint, num_forward_outputs))
    read = sources((value for value in outputs[num_forward_outputs:]
                    if isinstance(value, fx.Node)), crosses.__contains__)
    saved = [node for node in crosses if node in read]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {
        node: graph.node_copy(node) for node in joint.graph.find_nodes(op="placeholder")}
    cotangents = [copy for node, copy in copies.items() if is_cotangent(node)]

    def make(node: fx.Node, *sources: fx.Node) -> None:
        if node not in copies:
            copies[node] = graph.create_node("call_function", _placeholder, sources, name=node.name)
            copies[node].meta = node.meta

    for value in (*outputs[:num_forward_outputs], *saved):
        if isinstance(value, fx.Node):
            make(value)
    crossed = [copies[node] for node in saved]
    all_read = graph.call_function(_placeholder, (*crossed, *cotangents))
    for value in outputs[num_forward_outputs:]:
        if isinstance(value, fx.Node):
            make(value, all_read)
    output = graph.output([copies[value] if isinstance(value, fx.Node) else value
                           for value in outputs])
    output.meta = dict(joint.graph.output_node().meta)
    return split_joint_graph(fx.GraphModule(joint, graph), crossed, num_forward_outputs)


def _placeholder(*_: object) -> None:
    """Placeholder op of a stub graph; never executed."""


def crossing(joint: fx.GraphModule, num_forward_outputs: int) -> list[fx.Node]:
    """Values of the forward that the backward of an unplanned step would save."""
    dependent = descendants(filter(is_cotangent, joint.graph.find_nodes(op="placeholder")))
    needed = ancestors(n for n in joint.graph.output_node().args[0][:num_forward_outputs]
                       if isinstance(n, fx.Node))
    return [
        node for node in joint.graph.nodes
        if node not in dependent and node.op != "output"
        and isinstance(node.meta.get("val"), torch.Tensor)
        and (node in needed or node.op == "placeholder")
    ]


def results_of(graph: fx.GraphModule, mode: TorchDispatchMode, device: torch.device
                ) -> Callable[[list[Any]], list[Any]]:
    """A function that returns new tensors of the fake copy's kind, like the graph's outputs, with
    unknown values."""
    returned = graph.graph.output_node().args[0]
    values = [item.meta.get("val") if isinstance(item, fx.Node) else item for item in returned]

    def new_tensor(like: torch.Tensor) -> torch.Tensor:
        if isinstance(mode, StorageLessMode):
            with no_active_modes():
                return storage_less_tensor(
                    like, storage_less_storage(like.untyped_storage().nbytes())
                )
        with mode:
            return torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=device)

    def make(args: list[Any]) -> list[Any]:
        args.clear()
        return [new_tensor(v) if isinstance(v, torch.Tensor) else v for v in values]

    return make
