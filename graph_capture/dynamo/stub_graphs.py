"""A compiled graph in whose place other code runs, exchanged without tracing.

AOTAutograd gets a forward and a backward that stand for any: the forward returns, in the place of
the tensors that are saved, one empty tensor that carries what the backward is to run.  While a step
is recorded they make results of the right shapes; under a plan they run its schedule.

Blind spot: hooks for saved tensors see the empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.fake_copies.storage_less import StorageLessMode, storage_less_storage
from planner._graph_capture.joint_graph.joint import is_cotangent, is_view, primals_of
from planner._graph_capture.memory.sparse import is_sparse
from planner._graph_capture.torch_compat import (
    TorchDispatchMode,
    aot_backend,
    boxed,
    copied_module,
    no_active_modes,
    split_joint_graph,
    tensor_in_storage,
)

_CARRIED = "_checkpoint_planner_saved"
_CARRIER = "checkpoint_planner_carrier"

RunBackward = Callable[[list[Any]], Any]
"""A backward of its cotangents, a list that it empties."""


class Exchangeable(Protocol):
    """Code that runs in the place of a compiled graph."""

    def forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        """Outputs of the forward, and the tensor that carries its backward."""


T = TypeVar("T", bound=Exchangeable)


def compiled_as_stubs(
    module: fx.GraphModule, inputs: Sequence[Any], target_of: Callable[[fx.GraphModule, int], T],
    without_gradient: Callable[[fx.GraphModule], Callable[[list[Any]], Any]], *,
    make_backend: Callable[..., Callable[..., Any]] = aot_backend,
) -> tuple[Callable[..., Any], T | None]:
    """Compile a captured graph, in whose place other code runs: what `target_of` makes of its joint
    graph and the number of the forward's outputs; returns that, too.  A graph that needs no
    gradient is compiled by `without_gradient`, and there is no target."""
    target: T | None = None

    def partition(
        joint: fx.GraphModule, joint_inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        nonlocal target
        target = target_of(joint, num_fwd_outputs)
        return _stub_graphs_of(joint, num_fwd_outputs)

    def forward(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
        return without_gradient(graph) if target is None else _stub_forward(graph, target)

    def backward(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
        return _stub_backward(graph)

    return make_backend(partition, forward, backward)(module, list(inputs)), target


def carrier_of(backward: RunBackward) -> torch.Tensor:
    """A tensor that carries a backward."""
    carrier = torch.empty(0)
    setattr(carrier, _CARRIED, backward)
    return carrier


def _gradients(*args: object) -> Any:
    """Placeholder op of a stub graph; never executed."""
    raise AssertionError("a stub graph is not run")


def _stub_graphs_of(joint: fx.GraphModule, num_outputs: int
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


def _stub_forward(graph: fx.GraphModule, target: Exchangeable) -> Callable[[list[Any]], Any]:
    """Code that AOTAutograd calls as this forward, of the graphs of `_stub_graphs_of`."""
    inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    outputs = [getattr(node, "name", None) for node in graph.graph.output_node().args[0]]
    # It saves the symbols among its inputs that are sizes of cotangents.
    symbols = [inputs.index(name) for name in outputs[outputs.index(_CARRIER) + 1:]]

    def run(args: list[Any]) -> Any:
        sizes = [args[place] for place in symbols]
        results, carrier = target.forward(args)
        return (*results, carrier, *sizes)

    return boxed(run)


def _stub_backward(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Code that AOTAutograd calls as this backward, of the graphs of `_stub_graphs_of`."""
    given = graph.graph.find_nodes(op="placeholder")
    count = sum(map(is_cotangent, given))
    place = next(place for place, node in enumerate(given) if node.name == _CARRIER)

    def run(args: list[Any]) -> Any:
        cotangents, carrier = args[len(args) - count:], args[place]
        args.clear()
        return getattr(carrier, _CARRIED)(cotangents)

    return boxed(run)


class StubResults:
    """Stands for a joint graph with new tensors of the fake copy's kind, with unknown values."""

    def __init__(self, joint: fx.GraphModule, num_outputs: int | None, mode: TorchDispatchMode,
                 device: torch.device, *, has_views: bool = False) -> None:
        """`num_outputs`: those of the forward; `None`: all are.  `has_views`: code that runs in its
        place makes views where the graph does."""
        nodes = joint.graph.output_node().args[0]
        values = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in nodes]
        if any(map(is_sparse, values)):
            raise CaptureError(
                "a gradient is in coordinate form, as nn.Embedding(sparse=True) makes it, and such "
                "steps cannot be planned: use sparse=False; or plan the modules behind the "
                "embedding, for example by planner.within(model.body, ...); or account for the "
                "step as it is with planner.memory")
        self._outputs, self._gradients = values[:num_outputs], values[num_outputs:]
        self._views = [has_views and isinstance(node, fx.Node) and is_view(node)
                       for node in nodes[num_outputs:]]
        self._mode, self._device = mode, device

    def outputs(self) -> list[Any]:
        """Outputs of the forward."""
        return [*map(self._made, self._outputs)]

    def gradients(self) -> list[Any]:
        """Results of the backward."""
        # A view keeps its base, so that autograd does not add to it in place.
        return [made.as_strided(made.size(), made.stride()) if of_base else made for made, of_base
                in zip(map(self._made, self._gradients), self._views, strict=True)]

    def _made(self, like: Any) -> Any:
        if not isinstance(like, torch.Tensor):
            return like
        if isinstance(self._mode, StorageLessMode):
            with no_active_modes():
                return tensor_in_storage(
                    storage_less_storage(like.untyped_storage().nbytes(), self._device), like)
        with self._mode:
            return torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=self._device)
