"""The graphs that Dynamo captures of a model, compiled by Inductor with several partitions.

Dynamo runs once: it passes each captured graph, with inputs that have no memory, to the current
backend, and calls the compiled result.  Another backend later gets the same graphs, and Inductor's
work before the partition is not repeated.  Blocks that are compiled one by one may share a graph
and still have different backends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from planner._graph_capture.dynamo.block_calls import BlockCalls
from planner._graph_capture.dynamo.same_graph import DynamoBackend, RepeatedGraphs
from planner._graph_capture.module_forward import in_place_of_forward
from planner._graph_capture.torch_compat import compile_module, weakly
from planner._graph_capture.torch_compat.joint_replay import JointReplay


@dataclass(frozen=True, eq=False)
class GraphCode:
    """The graphs as one backend, Inductor with its own partitioner, compiles them."""

    backend: DynamoBackend
    compiled: dict[int, Callable[..., Any]] = field(default_factory=dict)
    """Compiled code by number of the graph."""


@dataclass(frozen=True, eq=False)
class _Graph:
    module: fx.GraphModule
    inputs: list[Any]
    joint: JointReplay
    inputs_of: dict[str, list[Any]] = field(default_factory=dict)
    """For each block that has run the graph, the inputs with that block's parameters and
    buffers."""


class CapturedGraphs:
    """The graphs of one model, or of its blocks."""

    def __init__(self, model: nn.Module, backend: DynamoBackend, blocks: Sequence[str] = ()
                 ) -> None:
        """`backend`: compiles the graphs at first; `blocks`: names of the submodules that are
        compiled one by one, none for the whole model."""
        first = GraphCode(backend)
        self._code_of: Callable[[str], GraphCode] = lambda block: first
        self._chosen: dict[tuple[int, str], Callable[..., Any]] = {}
        self._graphs: list[_Graph] = []
        self._calls: list[Callable[..., Any]] = []
        self._fixed = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.repeated = RepeatedGraphs(self._capture, lambda: self.running)
        """The backend that Dynamo calls."""
        self._blocks = BlockCalls(model, blocks, self.repeated) if blocks else None
        self._whole = None if blocks else compile_module(model, self.repeated)
        self.call = model
        """The model; inside `installed` it or its blocks are compiled."""

    @property
    def running(self) -> str:
        """Name of the block that is running."""
        return self._blocks.running if self._blocks else ""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, `call` runs the graphs."""
        with (self._blocks.installed() if self._blocks
              else in_place_of_forward(self.call, self._whole)):
            yield

    def compile_with(self, code_of: Callable[[str], GraphCode]) -> None:
        """From here on each block (the whole model is "") runs the graphs as its code's backend
        compiles them; graphs without a backward stay as they are."""
        self._code_of = code_of
        for number, graph in enumerate(self._graphs):
            if not graph.joint.is_complete:
                continue
            for block, inputs in graph.inputs_of.items():
                code = code_of(block)
                if number not in code.compiled:
                    with graph.joint.replay():
                        code.compiled[number] = code.backend(graph.module, inputs)
                self._chosen[number, block] = code.compiled[number]

    def _capture(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        number, graph = len(self._graphs), _Graph(module, list(inputs), JointReplay())
        self._graphs.append(graph)
        code = self._code_of(self.running)
        with graph.joint.record():
            first = code.compiled[number] = code.backend(module, inputs)

        def call(*args: Any) -> Any:
            block = self.running
            if block not in graph.inputs_of:
                # Keep no activation alive.
                graph.inputs_of[block] = [mine if id(mine) in self._fixed else like
                                          for mine, like in zip(args, graph.inputs, strict=True)]
            return self._chosen.get((number, block), first)(*args)

        self._calls.append(call)
        return weakly(call)
