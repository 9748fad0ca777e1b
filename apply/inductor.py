"""The applied model under Inductor: the plan decides which results cross from forward to backward
and which are recomputed, and Inductor compiles the two graphs.

Inductor passes its partitioner the joint graph after its decompositions and joint passes; a plan
for it was made on the same graph.  Inductor's scheduler orders the graphs: it starts from the
plan's order, and deviates where kernels fuse or its own estimate of the peak is lower.  The
generated code is therefore checked to use no more memory than planned, for smaller inputs, too.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from planner._apply.errors import PlanMismatch
from planner._apply.host_store import OPS
from planner._apply.plan_backend import Match, PlanBackend
from planner._apply.rewrite import RewrittenRegion
from planner._apply.rewrite_spec import RewriteSpec
from planner._graph_capture.inductor.compiled_step import memory_of_code
from planner._graph_capture.inductor.shortened import FindRuns, LeftOut, shorten
from planner._graph_capture.inductor.within_kernels import Fusion, fusion_of
from planner._graph_capture.joint_graph.joint import is_tuple_element, is_view, tensors_of
from planner._graph_capture.joint_graph.low_peak_backward import REALIZED_COPY
from planner._graph_capture.joint_graph.replay import is_companion
from planner._graph_capture.joint_graph.walks import operands, readers
from planner._graph_capture.torch_compat import PartitionFunction
from planner._graph_capture.torch_compat.inductor import (
    declare_fallback,
    inductor_backend,
    is_stored,
    store_result,
)
from planner._graph_capture.torch_compat.scheduler_pass import (
    KernelOrder,
    SchedulerPass,
    UnfusedKernels,
)
from planner._graph_capture.training_graph import CodeMemory

_WORTH_SHORTENING = 0.6
"""A graph that would keep more than this fraction of its ops is compiled whole."""
_FORMAT = "checkpoint-planner 13"
"""Version that changes whenever the same rewrite spec gives other graphs than before."""


class InductorBackend(PlanBackend):
    """The Dynamo backend that lets Inductor compile a rewrite spec's graphs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._generated: dict[tuple[int, bool], Callable[[], CodeMemory]] | None = None
        self._find_runs: FindRuns | None = None
        self.left_out: tuple[LeftOut, ...] = ()
        """Layers left out of the graph compiled last."""

    def leave_out_layers(self, find_runs: FindRuns) -> None:
        """From now on, compile graphs without most of the repeated layers.  Their code is only for
        its memory (`graph_capture.inductor.shortened`), not to be run."""
        self._find_runs = find_runs

    def keep_code(self) -> None:
        """From now on, keep generated code for `memory_of_code`."""
        self._generated = {}

    def memory_of_code(self) -> tuple[tuple[CodeMemory, ...], ...]:
        """Memory of the forward and the backward code of each region; empty for a region that was
        not captured, or lacks one of the two."""
        generated = self._generated or {}
        both = [[generated.get((index, is_backward)) for is_backward in (False, True)]
                for index in range(len(self._spec.regions))]
        return tuple(tuple(follow() for follow in pair if follow) if all(pair) else ()
                     for pair in both)

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any], partition: PartitionFunction,
                 match: Callable[[], Match | None]) -> Callable[..., Any]:
        def finish(inputs: list[Any], run: Callable[[list[Any]], Any], is_backward: bool) -> Any:
            found = match()
            if found is None:  # A graph without gradients is not partitioned.
                return run
            self._check_memory(found, inputs, run, is_backward)
            return self._checked(found, run) if is_backward else run

        passes: list[SchedulerPass] = [KernelOrder(self._spec.kernel_order)]
        settings: dict[str, Any] = {}
        if self._spec.low_memory_codegen:
            passes.append(UnfusedKernels())
            # Inductor reuses a buffer if its own estimate of the peak allows it, and the estimate
            # is above the peak.
            settings["allow_buffer_reuse"] = False
        return inductor_backend(
            partition, uuid_of(self._spec), finish=finish,
            settings=settings | {each.setting: each for each in passes})(module, inputs)

    def _prepared(self, match: Match, graphs: RewrittenRegion, num_outputs: int
                  ) -> RewrittenRegion:
        for node in (*graphs.forward.graph.nodes, *graphs.backward.graph.nodes):
            if node.target is REALIZED_COPY or is_companion(node.target):
                declare_fallback(node.target)
        for graph in (graphs.forward.graph, graphs.backward.graph):
            call_transfers_as_ops(graph)
        if self._spec.kernel_order:
            realize_across_library_calls(graphs.backward.graph)
        if self._find_runs is None:
            return graphs
        short = shorten(graphs.forward, graphs.backward, num_outputs, self._find_runs)
        whole, rest = (sum(node.op == "call_function" for node in (*first.nodes, *second.nodes))
                       for first, second in ((graphs.forward.graph, graphs.backward.graph),
                                             (short.forward.graph, short.backward.graph)))
        if rest > _WORTH_SHORTENING * whole:
            return graphs
        self.left_out = short.left_out
        return RewrittenRegion(short.forward, short.backward)

    def _check_memory(self, found: Match, inputs: list[Any], compiled: Any, is_backward: bool
                      ) -> None:
        """Raise `PlanMismatch` if the generated code uses more memory than planned."""
        follow = partial(memory_of_code, compiled, inputs)
        if self._generated is not None:
            self._generated[found.index, is_backward] = follow
        if not found.region.code:
            return
        planned, needed = found.region.code[is_backward], follow()
        if not planned.serves(needed):
            raise PlanMismatch(
                "the code that Inductor generates for the "
                f"{'backward' if is_backward else 'forward'} with these"
                f"{' smaller' if found.is_resized else ''} inputs takes "
                f"{needed.peak_bytes:,} bytes and leaves {needed.left_bytes:,}, where that of the "
                f"plan takes {planned.peak_bytes:,} and leaves {planned.left_bytes:,}. Make a plan "
                "for these inputs")


def uuid_of(spec: RewriteSpec) -> str:
    """Identify a rewrite spec in the keys of Inductor's caches: equal for equal rewrite specs, in
    every process."""
    graphs = replace(spec, signature=None, ops=(), buffers=())
    return hashlib.sha256(f"{_FORMAT}\0{graphs!r}".encode()).hexdigest()


def call_transfers_as_ops(graph: fx.Graph) -> None:
    """Replace the functions that move results to the host and back by ops that take and return
    tensors."""
    for node in graph.nodes:
        op = OPS.get(node.target) if node.op == "call_function" else None
        if op is not None:
            declare_fallback(op)
            node.target = op
            args: Any = fx.map_arg(node.args, lambda source: source.meta["val"])
            with args[0].fake_mode:
                node.meta["val"] = op(*args)


def realize_across_library_calls(graph: fx.Graph) -> None:
    """Mark results of generated kernels that are read after a kernel of a library, unless their
    operands are smaller.

    Inductor recomputes a pointwise result in each kernel that reads it, and so keeps its operands
    alive until the last of them, where the schedule stores the result.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    external = [position for node, position in order.items() if _is_external(node)]
    for node, position in order.items():
        following = bisect_right(external, position)
        if (_is_generated(node) and isinstance(node.meta.get("val"), torch.Tensor)
                and following < len(external) and external[following] < _last_read(node, order)
                and _bytes_of(node) <= sum(map(_bytes_of, _held_for(node)))):
            store_result(node)


def _is_external(node: fx.Node) -> bool:
    return _makes_values(node) and fusion_of(node) is Fusion.EXTERNAL


def _is_generated(node: fx.Node) -> bool:
    maker = node.args[0] if is_tuple_element(node) else node
    return _makes_values(maker) and fusion_of(maker) is not Fusion.EXTERNAL


def _makes_values(node: fx.Node) -> bool:
    return node.op == "call_function" and not _is_alias(node)


def _is_alias(node: fx.Node) -> bool:
    return is_view(node) or is_tuple_element(node)


def _last_read(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """Return the position of the last op that reads the node or a view of it; -1 if none does."""
    return max((order[user] for user in readers(node, _is_alias) if user.op != "output"),
               default=-1)


def _held_for(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that stay alive until a kernel reads this node, if it is not stored: inputs
    of the graph, results of libraries' kernels and of reductions, and stored results."""
    return operands(node.args[0] if is_tuple_element(node) else node, lambda source: (
        is_view(source) or (_makes_values(source) and not is_stored(source)
                            and fusion_of(source) is Fusion.POINTWISE)))


def _bytes_of(node: fx.Node) -> int:
    return sum(int(tensor.numel() * tensor.element_size())
               for tensor in tensors_of(node.meta.get("val")))
