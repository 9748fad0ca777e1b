"""Calls of a graph that compute the same value become one.

torch's own pass, `fx_graph_cse`, imports Inductor, which takes longer than most plans.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import fx

from planner._graph_capture.joint_graph.replay import is_random
from planner._graph_capture.torch_compat import OpOverload, pytree, schema_of, storage_key

_EMPTY = torch.ops.aten.empty.memory_format


def without_duplicates(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph in which calls of one function with equal arguments are one.

    Random calls and uninitialised tensors stay apart, as do calls before and after one that writes
    into a tensor.  So does what shares memory with an output: plain training returns two tensors.
    """
    unique = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    first: dict[Hashable, fx.Node] = {}
    returned = set().union(*map(_storages, graph.output_node().all_input_nodes))
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
            first.clear()
            alone = True
        else:
            alone = (node.op != "call_function" or node.target is _EMPTY or is_random(node)
                     or not returned.isdisjoint(_storages(node)))
        key = None if alone else (node.target, _key(node.args, copies), _key(node.kwargs, copies))
        if key in first:
            copies[node] = first[key]
            continue
        copies[node] = unique.node_copy(node, copies.__getitem__)
        if key is not None:
            first[key] = copies[node]
    return unique


def _storages(node: fx.Node) -> set[int]:
    return {storage_key(value) for value in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(value, torch.Tensor) and value.layout is torch.strided}


def _key(argument: object, copies: Mapping[fx.Node, fx.Node]) -> Hashable:
    """A key that equal arguments share: 1, 1.0 and True differ, as 0.0 and -0.0 do."""
    match argument:
        case fx.Node():
            return copies[argument]
        case list() | tuple():
            return (type(argument), *(_key(each, copies) for each in argument))
        case dict():
            return (dict, *((name, _key(each, copies)) for name, each in argument.items()))
        case slice():
            return (slice, *(_key(each, copies)
                             for each in (argument.start, argument.stop, argument.step)))
        case _:
            return type(argument), repr(argument)
