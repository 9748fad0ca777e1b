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
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from planner._graph_capture.dynamo.traced_code import TracedCode, as_written
from planner._graph_capture.module_forward import in_place_of_forwards, own_forward
from planner._graph_capture.torch_compat import called_unseen, weakly

if TYPE_CHECKING:
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

    def __init__(self, model: nn.Module, backend: DynamoBackend, blocks: Sequence[str] = (), *,
                 captures_rest: bool = False) -> None:
        """`backend`: compiles the graphs at first; `blocks`: names of the submodules that are
        compiled one by one, none for the whole model; `captures_rest`: and what stands around
        them."""
        first = GraphCode(backend)
        self._code_of: Callable[[str], GraphCode] = lambda block: first
        self._chosen: dict[tuple[int, str], Callable[..., Any]] = {}
        self._graphs: list[_Graph] = []
        self._calls: list[Callable[..., Any]] = []
        self._fixed = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.repeated = RepeatedGraphs(self._capture, lambda: self.running)
        """The backend that Dynamo calls."""
        self._code = TracedCode()  # torch refers to it weakly
        self._code.backend = self.repeated
        self._compiled = CompiledCalls(model, blocks, self._code, captures_rest=captures_rest)
        self.call = model
        """The model; inside `installed` it or its blocks are compiled."""
        self._is_installed = False

    @property
    def running(self) -> str:
        """Name of the block that is running."""
        return self._compiled.running

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, `call` runs the graphs."""
        with self._compiled.installed():
            self._is_installed = True
            try:
                yield
            finally:
                self._is_installed = False

    def compile_with(self, code_of: Callable[[str], GraphCode]) -> None:
        """From here on each block (the whole model is "") runs the graphs as its code's backend
        compiles them; graphs without a backward run op by op."""
        self._code_of = code_of
        for number, graph in enumerate(self._graphs):
            if not graph.joint.is_complete:
                self._chosen |= {(number, block): graph.module for block in graph.inputs_of}
                continue
            for block, inputs in graph.inputs_of.items():
                code = code_of(block)
                if number not in code.compiled:
                    with graph.joint.replay():
                        code.compiled[number] = code.backend(graph.module, inputs)
                self._chosen[number, block] = code.compiled[number]

    def _capture(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # It loads Inductor, which takes a second and fails where files are read as ASCII.
        from planner._graph_capture.torch_compat.joint_replay import JointReplay

        number, graph = len(self._graphs), _Graph(module, list(inputs), JointReplay())
        self._graphs.append(graph)
        code = self._code_of(self.running)
        with graph.joint.record():
            first = code.compiled[number] = code.backend(module, inputs)

        written = as_written(module)

        def call(*args: Any) -> Any:
            if not self._is_installed:
                return written(*args)
            block = self.running
            if block not in graph.inputs_of:
                # Keep no activation alive.
                graph.inputs_of[block] = [mine if id(mine) in self._fixed else like
                                          for mine, like in zip(args, graph.inputs, strict=True)]
            return self._chosen.get((number, block), first)(*args)

        self._calls.append(call)
        return weakly(call, written)


DynamoBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class RepeatedGraphs:
    """A Dynamo backend that recognizes graphs that Dynamo captures again.  Mutable.

    Some code changes the model at its first call (the classification losses of transformers write
    `config.problem_type`).  It is traced again at the second call and gives the same graph, which
    reuses the compiled code of the first.
    """

    def __init__(self, backend: DynamoBackend, running: Callable[[], str]) -> None:
        """`backend` compiles; `running` returns the name of the block whose graph is compiled."""
        self._backend, self._running = backend, running
        self._known: list[tuple[object, fx.GraphModule, Callable[..., Any]]] = []
        self.are_expected = False
        """True if a known graph is not compiled again, as from the second step on.  Within one step
        it may be another part of the model."""

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        key = (self._running(), torch.is_grad_enabled(), _texts(module), _constants(module),
               _layouts(inputs))
        if self.are_expected:
            alike = [compiled for known, _, compiled in self._known if known == key]
            if len(alike) == 1:  # otherwise the graph may be any of several parts
                return alike[0]
        compiled = self._backend(module, inputs)
        self._known.append((key, module, compiled))
        return compiled


def _texts(module: fx.GraphModule) -> list[str]:
    """The computation of a graph and its subgraphs, independent of the names of inputs."""
    return [_text(part.graph) for part in module.modules() if isinstance(part, fx.GraphModule)]


def _text(graph: fx.Graph) -> str:
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        arguments: Any = fx.map_arg((node.args, node.kwargs), number.__getitem__)
        lines.append(f"{node.op} {node.target if node.op != 'placeholder' else ''} {arguments}")
    return "\n".join(lines)


def _constants(module: fx.GraphModule) -> list[object]:
    """The tensors that a graph reads in addition to its inputs."""
    return [id(value) for part in module.modules() if isinstance(part, fx.GraphModule)
            for node in part.graph.find_nodes(op="get_attr")
            if isinstance(value := getattr(part, str(node.target), None), torch.Tensor)]


def _layouts(inputs: Sequence[Any]) -> list[object]:
    """Facts about inputs on which compilation depends: the identity of parameters, the layout of
    other tensors, and shared storages."""
    storages: dict[int, int] = {}
    return [id(value) if isinstance(value, torch.nn.Parameter)
            else (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype,
                  value.device, value.requires_grad,
                  storages.setdefault(value.untyped_storage()._cdata, number))
            if isinstance(value, torch.Tensor) else (type(value), str(value))
            for number, value in enumerate(inputs)]


class CompiledCalls:
    """Compiled calls of a model, or of some submodules of one that otherwise runs as it is
    written."""

    def __init__(self, model: nn.Module, names: Sequence[str], code: TracedCode, *,
                 captures_rest: bool) -> None:
        """`names`: of the submodules, none for the whole model; `captures_rest`: what stands around
        them is compiled, too."""
        self.running = ""
        """Name of the block that is running; empty outside of blocks."""
        self._blocks = [(block, self._call_of(name, block, code.function_of(block)))
                        for name in names for block in [model.get_submodule(name)]]
        self._whole = [(model, code.forward_of(model))] if captures_rest or not names else []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, they run compiled."""
        unseen = [block for block, _ in self._blocks if self._whole]
        with in_place_of_forwards((*self._whole, *self._blocks)), called_unseen(unseen):
            yield

    def _call_of(self, name: str, block: nn.Module, compiled: Callable[..., Any]
                 ) -> Callable[..., Any]:
        own = own_forward(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.running = self.running, name
            try:
                # Code at which the graph breaks runs under the dispatch modes, too.
                return compiled(block, own, *args, **kwargs)
            finally:
                self.running = before

        # The code around breaks there, and calls the block between its hooks.
        return torch.compiler.disable(run)
