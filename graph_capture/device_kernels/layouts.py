"""Results on another device of the ops of a graph that was traced on the CPU.

The model of the world: without autograd, torch's fake kernels know the results of an op on an
absent device, e.g. dtypes of saved statistics and strides of library outputs.  So a joint graph,
which already contains the backward, is run once more on fake tensors of the target device.  An op
without a fake kernel there keeps its CPU result.

Blind spots: tensors that the model's code puts on the CPU on purpose count as on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from planner._graph_capture.joint_graph.joint import traced_call
from planner._graph_capture.torch_compat import (
    FakeTensor,
    copied_module,
    fake_tensor,
    no_active_modes,
    pytree,
    storage_key,
    tensor_in_storage,
)


def on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of a joint graph whose values and ops are on `device`."""
    moved = copied_module(module, module.graph)
    with no_active_modes(), torch.no_grad():
        mover = _Mover(device)
        for node in moved.graph.nodes:
            if node.op == "call_function":
                node.args, node.kwargs = pytree.tree_map(
                    mover.placed, (node.args, dict(node.kwargs)))
            if "val" in node.meta:
                node.meta["val"] = mover.value(node)
    return moved


class _Mover:
    """Moves node values to another device; shared storages stay shared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}

    def placed(self, argument: Any) -> Any:
        """An argument of a node, with the CPU replaced by the device."""
        return self._device if isinstance(argument, torch.device) and (
            argument.type == "cpu") else argument

    def value(self, node: fx.Node) -> Any:
        """Result of a node on the device; those of its operands are known."""
        args, kwargs, known = traced_call(node)
        modes = {leaf.fake_mode for leaf in pytree.tree_leaves(known)
                 if isinstance(leaf, FakeTensor)}
        if node.op == "call_function" and modes:
            try:
                with modes.pop():
                    return node.target(*args, **kwargs)
            except Exception:  # a fake kernel may fail without the device
                pass
        return pytree.tree_map(self._moved, known)

    def _moved(self, leaf: Any) -> Any:
        if not isinstance(leaf, FakeTensor) or leaf.device.type != "cpu":
            return leaf
        storage = self._storages.setdefault(storage_key(leaf), torch.UntypedStorage(
            leaf.untyped_storage().nbytes(), device="meta"))
        return fake_tensor(leaf.fake_mode, tensor_in_storage(storage, leaf), self._device)
