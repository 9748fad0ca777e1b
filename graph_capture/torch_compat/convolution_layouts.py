"""Inductor's choice of results that get the layout `channels_last` for convolutions.

Imported only if a step is planned for or run by Inductor, as `inductor`.

Inductor prefers that layout for all operands of convolutions and for all values computed from their
results.  Two kinds of these are better left as they are:

- Inputs of the graph, weights and images: Inductor would return a copy of each, which stays alive
  with the original from the forward to the backward.
- Values that reach a convolution only after their elements move to other dimensions.  Where a model
  computes with channels in the last dimension and permutes them for its convolutions (ConvNeXt,
  Swin), `channels_last` is the order of another dimension there, and each such result is copied
  before the next matrix product: 0.8 MB of 17 in a ConvNeXt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from planner._graph_capture.torch_compat.requirements import require

require(__name__)

import torch
from torch import fx
from torch._inductor.graph import GraphLowering

_aten = torch.ops.aten
_CONVOLUTIONS = frozenset({_aten.convolution.default, _aten.convolution_backward.default})
_OTHER_DIMENSIONS = frozenset({
    _aten.permute, _aten.transpose, _aten.t, _aten.view, _aten.reshape, _aten._unsafe_view,
    _aten.unsqueeze, _aten.squeeze, _aten.select, _aten.as_strided,
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm,
})
"""Ops whose results have their elements in other dimensions than their operands."""


@contextlib.contextmanager
def layouts_of_their_own() -> Iterator[None]:
    """Inside, `channels_last` is used neither for inputs of a graph nor for values related to a
    convolution only through other dimensions."""
    find = GraphLowering.find_nodes_prefer_channels_last

    def find_some(graph: GraphLowering) -> Any:
        found = find(graph)
        near = _related_to_convolutions(graph.module.graph)
        return type(found)(node for node in found if node.op != "placeholder" and node in near)

    with mock.patch.object(GraphLowering, "find_nodes_prefer_channels_last", find_some):
        yield


def _related_to_convolutions(graph: fx.Graph) -> set[fx.Node]:
    """Operands of convolutions, and nodes computed from these or from their results, dimension by
    dimension."""
    related: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.target in _CONVOLUTIONS or any(
                user in related and not _deals_anew(user) for user in node.users):
            related.add(node)
    for node in graph.nodes:
        if node in related:
            related.update(user for user in node.users if not _deals_anew(user))
    return related


def _deals_anew(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _OTHER_DIMENSIONS
