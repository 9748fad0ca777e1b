"""Layouts of tensors in graphs that Inductor compiles.

On a CPU, and elsewhere where it expects a gain, Inductor uses `channels_last` for convolutions in
any traced graph.  A result that the backward of a convolution and another op read keeps the layout
of the trace, and is then copied.  The trace is therefore changed to `channels_last`, which follows
from the layout of the weights.
"""

from __future__ import annotations

import torch
from torch import fx

from planner._graph_capture.joint_graph.convolution_backward import OUTPUT_MASK
from planner._graph_capture.torch_compat.inductor import lays_out_for_convolutions

_CONVOLUTION = torch.ops.aten.convolution.default
_READ_WEIGHTS = {_CONVOLUTION: 1, torch.ops.aten.convolution_backward.default: 2}
"""Positions of the arguments that are weights."""


def lay_out_weights(backward: fx.GraphModule) -> None:
    """Give convolutions of the backward weights in `channels_last`, where Inductor would.  This
    applies where the result is an activation or its gradient; the result is then traced in that
    layout, too."""
    if not lays_out_for_convolutions(backward):
        return
    for node in backward.graph.nodes:
        if node.target in _READ_WEIGHTS and (node.target is _CONVOLUTION
                                             or node.args[OUTPUT_MASK][0]):
            position = _READ_WEIGHTS[node.target]
            weight = node.args[position]
            if _would_change(weight):
                with backward.graph.inserting_before(node):
                    copy = backward.graph.call_function(
                        torch.ops.aten.clone.default, (weight,),
                        {"memory_format": torch.channels_last})
                copy.meta = dict(weight.meta)
                with weight.meta["val"].fake_mode:
                    copy.meta["val"] = weight.meta["val"].clone(memory_format=torch.channels_last)
                node.update_arg(position, copy)
    backward.recompile()


def _would_change(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (isinstance(value, torch.Tensor) and value.dim() == 4
            and not value.is_contiguous(memory_format=torch.channels_last))
