"""The graphs with symbolic sizes of one model, by the calls that they are for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from planner._apply.call_signature import Call
from planner._graph_capture.module_forward import Forward
from planner._graph_capture.torch_compat import running_node_number
from planner.attached.planned_graph import PlannedGraph
from planner.attached.symbolic_graph import SymbolicGraph

log = logging.getLogger("planner")

_MOST_FIXED = 256
"""Remembered calls that need a graph with fixed sizes."""


_MOST_FAILURES = 2
"""Attempts at a symbolic capture; torch fixes a size that equals one of the model's."""


class SymbolicGraphs:
    """A graph with symbolic sizes for calls that differ in sizes alone, from the second size on."""

    def __init__(self, module: nn.Module, inner: Forward | None) -> None:
        self._module, self._inner = module, inner
        self._by_call: dict[Call, SymbolicGraph | None] = {}
        """By calls without sizes; `None`: it cannot be captured so."""
        self._failures = 0
        self._fixed: dict[Call, None] = {}
        """Calls for which torch makes a graph with fixed sizes."""

    def graph_for(self, call: Call, graphs: Sequence[PlannedGraph], *, at_once: bool = False
                  ) -> SymbolicGraph | None:
        """The graph for a call which no graph with fixed sizes is for, or, `at_once`, for any; or
        `None`."""
        fixed = [graph for graph in graphs if not isinstance(graph, SymbolicGraph)]
        kind = call.without_sizes
        is_made = self._by_call.get(kind) is not None
        if call in self._fixed or running_node_number() is not None or (
                not at_once and any(graph.call == call and not (is_made and graph.is_provisional)
                                    for graph in fixed)):
            return None
        if kind not in self._by_call:
            found = next((graph for graph in fixed if graph.planner is not None and graph.call
                          and graph.call.without_sizes == kind
                          and graph.planner.can_be_symbolic), None)
            if found is None:
                return None
            self._by_call[kind] = SymbolicGraph(found, self._module, self._inner)
        return self._by_call[kind]

    def give_up(self, graph: SymbolicGraph, call: Call, reason: BaseException) -> None:
        """Note that this call, or where no call has run, all like it, takes a graph with fixed
        sizes; said once."""
        if len(self._fixed) < _MOST_FIXED:
            self._fixed[call] = None
        self._failures += 1
        if graph.has_run or self._failures < _MOST_FAILURES:
            return
        self._by_call[call.without_sizes] = None
        log.warning("%s cannot be captured with symbolic sizes, so that each size of its inputs "
                    "is captured by itself: %s", type(self._module).__name__,
                    str(reason).strip().partition("\n")[0] or type(reason).__name__)
