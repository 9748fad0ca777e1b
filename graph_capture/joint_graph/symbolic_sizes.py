"""Sizes that are expressions in symbols, as functions of the symbols' values.

Dynamo gives each symbol of a graph as an input of it.  Here all other symbolic numbers of a joint
graph are put into terms of those, so that no size is read off a tensor that the schedule may have
freed, and so that any size is a number as soon as the symbols have values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.joint_graph.joint import eliminate_dead_code, is_number
from planner._graph_capture.torch_compat import (
    expression_of,
    function_of,
    is_float,
    places_in_storage,
    pytree,
    size_now,
)

Values = tuple[int, ...]
"""Of the symbols of a graph, in the order of its inputs."""


@dataclass(slots=True)
class Sizes:
    """The symbols of one graph, and functions of them, each made once."""

    symbols: tuple[Any, ...]
    now: Values = ()
    """The symbols' values in the call that the graph was compiled for."""
    places: Mapping[Any, Any] = field(default_factory=dict)
    """Other inputs of the graph, which only say where tensors lie in their storages, as expressions
    in the symbols (`places_in_storage`): the code takes them as they come, the accounting so."""
    numbers: tuple[Any, ...] = ()
    """Other inputs of the graph on which no size depends (`varying_numbers`)."""
    _functions: dict[Any, Callable[..., int]] = field(default_factory=dict)

    @classmethod
    def of(cls, primals: Sequence[fx.Node]) -> Sizes:
        """Those that a joint graph has as inputs; raises `CaptureError` where a size depends on a
        float."""
        if not any(map(is_number, primals)):
            return cls(())
        found = {expression_of(value): size_now(value) for node in primals
                 if isinstance(value := node.meta.get("val"), torch.SymInt)}
        places = places_in_storage([value for node in primals if isinstance(
            value := node.meta.get("val"), torch.Tensor)])
        # One that torch has fixed meanwhile is a number.
        symbols = {symbol: value for symbol, value in found.items()
                   if symbol.free_symbols and symbol not in places}
        in_sizes = _symbols_in_sizes(primals[0].graph)
        if floats := sorted(str(each) for each in in_sizes if is_float(each)):
            raise CaptureError(f"sizes depend on {', '.join(floats)}, which is no size")
        numbers = symbols.keys() - in_sizes
        return cls(tuple(each for each in symbols if each not in numbers),
                   tuple(value for each, value in symbols.items() if each not in numbers),
                   {symbol: place for symbol, place in places.items() if symbol in found},
                   tuple(each for each in symbols if each in numbers))

    @property
    def _inputs(self) -> tuple[Any, ...]:
        """The symbols that the graph takes."""
        return *self.symbols, *self.places, *self.numbers

    def function(self, size: Any) -> Callable[..., int]:
        """A size as a function of the inputs that `givers` names."""
        expression = expression_of(size)
        if expression not in self._functions:
            self._functions[expression] = function_of(expression, self._inputs)
        return self._functions[expression]

    def number(self, size: Any, values: Values) -> int:
        """A size where the symbols have these values."""
        if not isinstance(size, torch.SymInt):
            return size
        unread = [0] * len(self.numbers)
        unused = [0] * len(self.places) + unread
        placed = [self.function(place)(*values, *unused) for place in self.places.values()]
        return int(self.function(size)(*values, *placed, *unread))

    def at(self, value: object, values: Values, mode: Any) -> Any:
        """The traced value of a node with numbers for sizes; tensors are fakes of `mode`."""
        def of(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                numbers = [tuple(self.number(each, values) for each in part)
                           for part in (leaf.shape, leaf.stride())]
                with mode:
                    return torch.empty_strided(*numbers, dtype=leaf.dtype, device=leaf.device)
            return self.number(leaf, values)

        return pytree.tree_map(of, value)

    def places_among(self, inputs: Sequence[object]) -> tuple[int, ...]:
        """Index of each symbol among the inputs that a captured graph was compiled with."""
        found = [expression_of(each) if isinstance(each, torch.SymInt) else None
                 for each in inputs]
        return tuple(map(found.index, self.symbols))

    def givers(self, graph: fx.Graph) -> tuple[fx.Node, ...]:
        """The input of a graph that is each symbol, and then each of the places and numbers."""
        found: dict[Any, fx.Node] = {}
        for node in graph.find_nodes(op="placeholder"):
            if isinstance(node.meta.get("val"), torch.SymInt):
                found.setdefault(expression_of(node.meta["val"]), node)
        return tuple(map(found.__getitem__, self._inputs))

    def settle(self, graph: fx.Graph) -> None:
        """Compute each symbolic number among a graph's arguments from its inputs."""
        if not self._inputs:
            return
        operands = self.givers(graph)
        givers = dict(zip(self._inputs, operands, strict=True))
        nodes = list(graph.nodes)
        after = graph.find_nodes(op="placeholder")[-1]
        for node in reversed(nodes[:nodes.index(after)]):
            if node.op != "placeholder":  # it may read what is computed anew
                after.append(node)
        made: dict[Any, fx.Node] = {}

        def of(size: torch.SymInt) -> fx.Node:
            nonlocal after
            expression = expression_of(size)
            if expression in givers:
                return givers[expression]
            if expression not in made:
                with graph.inserting_after(after):
                    made[expression] = after = graph.call_function(
                        self.function(size), operands)
                after.meta["val"] = size
            return made[expression]

        def settled(argument: Any) -> Any:
            value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
            if not isinstance(value, torch.SymInt):
                return argument
            return of(value) if value.node.maybe_as_int() is None else value.node.maybe_as_int()

        for node in list(graph.nodes):
            if node.op in ("call_function", "output"):
                node.args = pytree.tree_map(settled, node.args)
                node.kwargs = pytree.tree_map(settled, dict(node.kwargs))
        eliminate_dead_code(graph)  # numbers, and tensors of which only sizes were read
        graph.lint()


def _symbols_in_sizes(graph: fx.Graph) -> set[Any]:
    """The symbols on which the layout of some tensor in a graph depends."""
    tensors = (leaf for node in graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))
               if isinstance(leaf, torch.Tensor))
    sizes = {expression_of(size) for tensor in tensors
             for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())
             if isinstance(size, torch.SymInt)}
    return set().union(*(size.free_symbols for size in sizes))
