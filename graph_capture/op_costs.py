"""What one run of a captured op costs: FLOPs, traffic, seconds and workspace.

Seconds come from the table of `graph_capture.device_model`, workspace from the probe of
`graph_capture.op_probe`.  Two models of seconds: `roofline`, the estimated duration of an op, and
`flops`, that of its arithmetic at one rate for every dtype, for who wants the least recomputed
FLOPs rather than the least time; there memory traffic counts a millionth, as a tie-break between
ops without arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graph_capture.assemble import OpCost
from graph_capture.device_model import device_model
from graph_capture.flops import bytes_moved, op_flops
from graph_capture.joint import tensors_of
from graph_capture.op_probe import OpProbe
from graph_capture.torch_compat import OpOverload


class OpCosts:
    """Costs of the ops on one device; workspace is measured once for each signature."""

    def __init__(
        self, device: torch.device, *, cost_model: str = "roofline", probe: bool = True
    ) -> None:
        self._model = device_model(device)
        self._least_flops = cost_model == "flops"
        self._probe = OpProbe(device, probe=probe)

    @property
    def assumed(self) -> frozenset[str]:
        """Ops whose workspace is a stated margin instead of a measurement."""
        return frozenset(self._probe.assumed)

    def workspace_bytes(
        self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> int:
        """What the op's kernel allocates for itself."""
        return self._probe.workspace_bytes(target, args, kwargs, out)

    def __call__(self, node: fx.Node) -> OpCost:
        """The cost of a node, by the values that tracing left in it."""
        args = fx.map_arg(node.args, _value_of)
        kwargs = fx.map_arg(dict(node.kwargs), _value_of)
        out = node.meta.get("val")
        target = node.target
        if not isinstance(target, OpOverload):
            moved = sum(t.numel() * t.element_size() for t in tensors_of((args, kwargs, out)))
            return OpCost(0, moved, self._seconds(0, moved, torch.float32), 0)
        flops = op_flops(target, args, kwargs, out)
        moved = bytes_moved(target, args, kwargs, out)
        tensors = tensors_of(out) or tensors_of(args)
        dtype = tensors[0].dtype if tensors else torch.float32
        return OpCost(flops, moved, self._seconds(flops, moved, dtype),
                      self.workspace_bytes(target, args, kwargs, out))

    def _seconds(self, flops: int, moved: int, dtype: torch.dtype) -> float:
        if self._least_flops:
            return (self._model.arithmetic_seconds(flops, torch.float32)
                    + 1e-6 * self._model.traffic_seconds(moved))
        return self._model.op_seconds(flops, moved, dtype)


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("val")


