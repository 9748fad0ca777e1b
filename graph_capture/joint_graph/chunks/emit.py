"""New nodes of a joint graph, with the values that tracing would have given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default})
"""Ops that convert to another dtype, as captured and as Inductor decomposes them."""
_NOT_TAKEN_OVER = frozenset({"val", "tensor_meta", "eager_input_vals", "unbacked_bindings"})


class Emitter:
    """Inserts nodes before another one."""

    def __init__(self, graph: fx.Graph, before: fx.Node, *, compiled: bool = False) -> None:
        """`compiled`: the graph has Inductor's decompositions."""
        self._graph, self._compiled = graph, compiled
        self._before = before
        self._mode = next(node.meta["val"].fake_mode for node in graph.nodes
                          if hasattr(node.meta.get("val"), "fake_mode"))

    def __call__(self, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any
                 ) -> fx.Node:
        """A new call, attributed to the source code of `like`."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key not in _NOT_TAKEN_OVER}
        values = fx.node.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        with self._mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def cast(self, value: fx.Node, dtype: torch.dtype, *, like: fx.Node) -> fx.Node:
        """A new conversion to another dtype."""
        if self._compiled:
            return self(torch.ops.prims.convert_element_type.default, value, dtype, like=like)
        return self(torch.ops.aten._to_copy.default, value, like=like, dtype=dtype)
