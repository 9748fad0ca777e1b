"""The graphs of a schedule that run in the place of a compiled graph, exchanged without tracing.

What is saved crosses over beside AOTAutograd (`graph_capture.dynamo.stub_graphs`).  As under
autograd, it is an error to change a saved tensor before the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner._apply.rewrite import RewrittenRegion
from planner._graph_capture.dynamo.stub_graphs import carrier_of
from planner._graph_capture.joint_graph.joint import is_cotangent
from planner._graph_capture.joint_graph.lower import LoweredRegion
from planner._graph_capture.torch_compat import BoxedCodeGen, backward_keeps_graph, boxed

_CHANGED = ("one of the variables needed for gradient computation has been modified by an inplace "
            "operation: a tensor of shape {shape}, which the planned step has saved for its "
            "backward (as an input, an output or between them), is at version {found}; expected "
            "version {saved} instead")


def boxed_callable(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the module's generated code as a function of a list of arguments, which it empties."""
    graph.graph.set_codegen(BoxedCodeGen())
    graph.recompile()
    return boxed(graph.forward)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledGraphs:
    """The two graphs of one schedule."""

    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]
    num_outputs: int
    """Outputs of the forward before the tensors that it saves."""
    reads: tuple[int, ...]
    """Indices among the saved values of the backward's inputs, before the cotangents."""
    checked: tuple[int, ...]
    """Indices of the saved tensors that nobody may change before the backward."""
    read_cotangents: tuple[frozenset[int], ...]
    """For each result of the backward, the cotangents that it is made of."""

    @classmethod
    def of(cls, graphs: RewrittenRegion, lowered: LoweredRegion) -> ScheduledGraphs:
        """Compile the two graphs that were made of this region."""
        joint = lowered.joint
        num_outputs = len(joint.forward_outputs)
        updated = {joint.primals[place].name for place in joint.mutations.values()}
        outputs = graphs.forward.graph.output_node().args[0]
        saved = [node.name for node in outputs[num_outputs:]]
        return cls(boxed_callable(graphs.forward), boxed_callable(graphs.backward), num_outputs,
                   tuple(saved.index(node.name) for node in
                         graphs.backward.graph.find_nodes(op="placeholder")
                         if not is_cotangent(node)),
                   tuple(place for place, node in enumerate(outputs[num_outputs:])
                         if isinstance(node.meta["val"], torch.Tensor)
                         and node.name not in updated), joint.read_cotangents)

    def run_forward(self, args: list[Any], run_backward: Callable[[list[Any]], Any]
                    ) -> tuple[Sequence[Any], torch.Tensor]:
        """Outputs of the forward, and a tensor that carries its backward."""
        results = self.forward(args)
        # An output itself would refer to its own backward.
        saved = [value.detach() if isinstance(value, torch.Tensor) else value
                 for value in results[self.num_outputs:]]
        versions = [saved[place]._version for place in self.checked]

        def backward(cotangents: list[Any]) -> Any:
            nonlocal saved
            for place, version in zip(self.checked, versions, strict=True):
                if saved[place]._version != version:
                    raise RuntimeError(_CHANGED.format(shape=list(saved[place].shape),
                                                       found=saved[place]._version, saved=version))
            args = [saved[place] for place in self.reads]
            if not backward_keeps_graph():
                saved = []
            args += cotangents
            cotangents.clear()
            return run_backward(args)

        return results[:self.num_outputs], carrier_of(backward)
