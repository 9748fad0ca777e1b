"""What Dynamo makes of a model, compiled by Inductor with one partition after the other.

Dynamo is run once: it hands each graph that it captures, with fake inputs, to the backend of the
moment, and calls what that made of it.  Another backend is then given the same graphs, and what
Inductor does before it partitions them is not done again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from graph_capture.torch_compat import compile_module
from graph_capture.torch_compat.joint_replay import JointReplay

DynamoBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class CapturedGraphs:
    """The graphs of one model; itself the backend that Dynamo knows."""

    def __init__(self, model: nn.Module, backend: DynamoBackend) -> None:
        """`backend`, like those of `compile_with`, is Inductor with a partitioner of its own."""
        self._backend = backend
        self._graphs: list[tuple[fx.GraphModule, list[Any], JointReplay]] = []
        self._compiled: list[Callable[..., Any]] = []
        self.call = compile_module(model, self)
        """The compiled model."""

    def compile_with(self, backend: DynamoBackend) -> None:
        """Compile the graphs with another backend; those without a backward stay as they are."""
        self._backend = backend
        for number, (module, inputs, joint) in enumerate(self._graphs):
            if joint.is_complete:
                with joint.replay():
                    self._compiled[number] = backend(module, inputs)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        number, joint = len(self._graphs), JointReplay()
        self._graphs.append((module, list(inputs), joint))
        with joint.record():
            self._compiled.append(self._backend(module, inputs))
        return torch.compiler.disable(lambda *args: self._compiled[number](*args))
