"""Graphs that Dynamo captures again although it has captured the same before.

Some code changes the model at its first call (the classification losses of transformers write
`config.problem_type`).  It is traced again at the second call and gives the same graph, which
reuses the compiled code of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

DynamoBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class RepeatedGraphs:
    """A Dynamo backend that recognizes repeated graphs.  Mutable."""

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
