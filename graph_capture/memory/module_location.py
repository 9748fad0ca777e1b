"""The module of each op while a model runs in eager mode, in the forward and the backward.

In the forward it is the innermost running module.  Autograd numbers its nodes as the forward makes
them; an op of the backward belongs to the module that was running when its node was numbered.

Blind spots: a node made by code outside of every module belongs to none (an empty name); sums that
autograd computes between two nodes count as the next node's.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from planner._graph_capture.torch_compat import next_node_number, running_node_number


class ModuleLocator:
    """Tracks the running modules of one model; a context in which they run."""

    def __init__(self, model: nn.Module) -> None:
        self._name_of = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._of_node: dict[int, str] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> ModuleLocator:
        self._running.clear()
        # Hooks for all modules rather than on each: the model stays as it is.
        self._handles = [register_module_forward_pre_hook(self._enter),
                         register_module_forward_hook(self._leave, always_call=True)]
        return self

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self) -> str:
        """The qualified name of the module of the op that runs now; for a module that is not the
        model's, such as a loss, its class."""
        node = running_node_number()
        if node is not None and not self._running:
            return self._of_node.get(node, "")
        name = self._running[-1] if self._running else ""
        # The node was numbered just before its op runs; later ops may have no node of their own.
        self._of_node.setdefault(next_node_number() - 1, name)
        return name

    def _enter(self, module: nn.Module, args: object) -> None:
        self._running.append(self._name_of.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, args: object, result: object) -> None:
        if self._running:
            self._running.pop()
