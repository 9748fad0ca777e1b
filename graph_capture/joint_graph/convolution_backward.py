"""The backward of a convolution in two halves, which need less memory one after the other.

ATen has one op for the gradients of input, weight and bias, which computes them one after the
other.  It keeps the first gradient alive while the next kernel allocates its buffers (on a CPU,
copies of its operands in another layout); as two ops, each is alone.  In a U-Net this is the peak
that no recomputation lowers.

The halves are the same op with another `output_mask`: they call the same kernels, and the results
are bitwise the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

_WHOLE = torch.ops.aten.convolution_backward.default
OUTPUT_MASK = 10
"""Position of the argument that selects the wanted gradients."""


def halves(target: object, args: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Arguments of the two calls into which a call can be split, the half for weight and bias
    first; none if it is no backward of a convolution, or makes only one of them."""
    if target is not _WHOLE or not (args[OUTPUT_MASK][0] and any(args[OUTPUT_MASK][1:])):
        return ()
    _, *of_weight = args[OUTPUT_MASK]
    return tuple((*args[:OUTPUT_MASK], mask)
                 for mask in ([False, *of_weight], [True, False, False]))


def halve_convolution_backwards(graph: fx.Graph) -> None:
    """Split each backward of a convolution that makes gradients of both input and weight."""
    for node in graph.find_nodes(op="call_function", target=_WHOLE):
        calls = halves(node.target, node.args)
        elements = list(node.users)
        if not calls or any(user.target is not operator.getitem for user in elements):
            continue
        with graph.inserting_before(node):
            of_weight, of_input = (_half(graph, node, args) for args in calls)
        for element in elements:
            element.replace_input_with(node, of_input if element.args[1] == 0 else of_weight)
        graph.erase_node(node)


def _half(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    half = graph.call_function(_WHOLE, args)
    half.meta = dict(node.meta)
    half.meta["val"] = tuple(value if wanted else None for value, wanted
                             in zip(node.meta["val"], args[OUTPUT_MASK], strict=True))
    return half
