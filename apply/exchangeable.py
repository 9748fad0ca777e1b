"""A compiled graph whose schedule can be exchanged without tracing.

AOTAutograd gets a forward and a backward that stand for those of any schedule: the forward returns,
in the place of the tensors that a schedule saves, one empty tensor that carries them, and the
backward finds them there.  As under autograd, it is an error to change a saved tensor before the
backward.

Blind spot: hooks for saved tensors see the empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from planner._apply.rewrite import RewrittenRegion
from planner._graph_capture.joint_graph.joint import is_cotangent, primals_of
from planner._graph_capture.joint_graph.lower import LoweredRegion
from planner._graph_capture.torch_compat import (
    BoxedCodeGen,
    backward_keeps_graph,
    boxed,
    copied_module,
    split_joint_graph,
)

_CARRIED = "_checkpoint_planner_saved"
_CARRIER = "checkpoint_planner_carrier"
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
                         and node.name not in updated))

    def run_forward(self, args: list[Any], run_backward: Callable[[list[Any]], Any]
                    ) -> tuple[Sequence[Any], torch.Tensor]:
        """Outputs of the forward, and a tensor that carries what `run_backward` reads."""
        results = self.forward(args)
        # An output itself would refer to its own backward.
        saved = [value.detach() if isinstance(value, torch.Tensor) else value
                 for value in results[self.num_outputs:]]
        versions = [saved[place]._version for place in self.checked]
        carrier = torch.empty(0)
        setattr(carrier, _CARRIED, (self, run_backward, saved, versions))
        return results[:self.num_outputs], carrier


def run_backward(carrier: torch.Tensor, cotangents: list[Any]) -> Any:
    """The backward of the schedule that the forward ran under."""
    graphs, run, saved, versions = getattr(carrier, _CARRIED)
    if not backward_keeps_graph():
        delattr(carrier, _CARRIED)
    for place, version in zip(graphs.checked, versions, strict=True):
        if saved[place]._version != version:
            raise RuntimeError(_CHANGED.format(
                shape=list(saved[place].shape), found=saved[place]._version, saved=version))
    args = [saved[place] for place in graphs.reads]
    del saved
    args += cotangents
    cotangents.clear()
    return run(args)


class Exchangeable(Protocol):
    """A graph under whatever schedule it has."""

    def forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        """Outputs of the forward, and the tensor that carries what is saved."""


def _gradients(*args: object) -> Any:
    """Placeholder op of a stub graph; never executed."""
    raise AssertionError("a stub graph is not run")


def stub_graphs_of(joint: fx.GraphModule, num_outputs: int
                   ) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward for AOTAutograd, between which one tensor crosses over."""
    module = copied_module(joint, joint.graph)
    graph = module.graph
    tensor: Any = next(node.meta["val"] for node in primals_of(module)
                       if isinstance(node.meta["val"], torch.Tensor))
    output = graph.output_node()
    returned = list(output.args[0])
    with graph.inserting_before(output):
        carrier = graph.create_node(
            "call_function", torch.ops.aten.empty.memory_format, ([0],), {}, name=_CARRIER)
        with tensor.fake_mode:
            carrier.meta["val"] = torch.empty(0)
        tangents = [node for node in graph.find_nodes(op="placeholder") if is_cotangent(node)]
        whole = graph.call_function(_gradients, (carrier, *tangents))
        whole.meta["val"] = None
        for place in range(num_outputs, len(returned)):
            if isinstance(returned[place], fx.Node):
                stub = graph.call_function(_gradients, (whole, place))
                stub.meta = {"val": returned[place].meta.get("val")}
                returned[place] = stub
    output.args = (returned,)
    graph.eliminate_dead_code()
    return split_joint_graph(module, [carrier], num_outputs)


def stub_forward(graph: fx.GraphModule, target: Exchangeable) -> Callable[[list[Any]], Any]:
    """What AOTAutograd calls as this forward, of the graphs of `stub_graphs_of`."""
    inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    outputs = [getattr(node, "name", None) for node in graph.graph.output_node().args[0]]
    # It saves the symbols among its inputs that are sizes of cotangents.
    symbols = [inputs.index(name) for name in outputs[outputs.index(_CARRIER) + 1:]]

    def run(args: list[Any]) -> Any:
        sizes = [args[place] for place in symbols]
        results, carrier = target.forward(args)
        return (*results, carrier, *sizes)

    return boxed(run)


def stub_backward(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """What AOTAutograd calls as this backward, of the graphs of `stub_graphs_of`."""
    given = graph.graph.find_nodes(op="placeholder")
    count = sum(map(is_cotangent, given))
    names = [node.name for node in given]
    carrier = next(place for place, name in enumerate(names) if name == _CARRIER)

    def run(args: list[Any]) -> Any:
        cotangents, carried = args[len(args) - count:], args[carrier]
        args.clear()
        return run_backward(carried, cotangents)

    return boxed(run)
