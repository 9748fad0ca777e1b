"""The blocks of a fake copy behind functions that Dynamo compiles, each block by itself.

Dispatch modes stay active: code at which the graph of a block breaks runs under them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn

from planner._graph_capture.dynamo.same_graph import DynamoBackend
from planner._graph_capture.module_forward import in_place_of_forwards, own_forward
from planner._graph_capture.module_hooks import hooks_within
from planner._graph_capture.torch_compat import (
    called_unseen,
    compile_forward,
    weakly,
)


class BlockCalls:
    """Compiled calls of some submodules of a model, which otherwise runs as it is written."""

    def __init__(self, model: nn.Module, names: Sequence[str], backend: DynamoBackend) -> None:
        """Modules of one class with the same hooks share compiled code where they can: after a hook
        breaks the graph, torch leaves the code alone."""
        self.running = ""
        """Name of the block that is running; empty outside of blocks."""
        self._backend = backend
        self._compiled: list[Callable[..., Any]] = []
        shared: dict[tuple[object, ...], Callable[..., Any]] = {}
        self._calls: list[tuple[nn.Module, Callable[..., Any]]] = []
        for name in names:
            block = model.get_submodule(name)
            kind = type(block), hooks_within(block)
            if kind not in shared:
                shared[kind] = compile_forward(type(block).__name__, self)
            self._calls.append((block, self._call_of(name, block, shared[kind])))

    def installed(self) -> AbstractContextManager[None]:
        """Inside, these submodules run compiled."""
        return in_place_of_forwards(self._calls)

    def unseen(self) -> AbstractContextManager[None]:
        """Inside, code around these submodules can be compiled as well."""
        return called_unseen(block for block, _ in self._calls)

    def _call_of(self, name: str, block: nn.Module, compiled: Callable[..., Any]
                 ) -> Callable[..., Any]:
        own = own_forward(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.running = self.running, name
            try:
                return compiled(block, own, *args, **kwargs)
            finally:
                self.running = before

        # The code around breaks there, and calls the block between its hooks.
        return torch.compiler.disable(run)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph, as a Dynamo backend."""
        compiled = self._backend(module, inputs)
        self._compiled.append(compiled)
        return weakly(compiled)
