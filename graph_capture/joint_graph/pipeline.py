"""The only path from a captured joint graph to the region that is planned and executed.

A plan names ops as they are after the rewriting, so capture and the backend must rewrite by the
same steps in the same order.  Only this module calls these steps: clean, run a part in chunks, make
results fresh (eager backend), copy late parts of gradients (low-peak variant), hoist updates
(Inductor), hoist, lower.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import fx

from planner._graph_capture.joint_graph.chunks.chunked import Chunked, run_in_chunks
from planner._graph_capture.joint_graph.fresh_results import make_results_fresh
from planner._graph_capture.joint_graph.hoisting import (
    hoist,
    hoist_updates,
    ops_to_hoist,
    saved_by_default,
)
from planner._graph_capture.joint_graph.joint import clean_joint_graph
from planner._graph_capture.joint_graph.low_peak_backward import late_parts, lower_backward_peak
from planner._graph_capture.joint_graph.lower import LoweredRegion, lower
from planner._graph_capture.joint_graph.symbolic_sizes import Sizes


@dataclass(frozen=True, slots=True)
class JointVariant:
    """The variant into which a joint graph is rewritten."""

    compiled: bool = False
    """For Inductor to compile; otherwise it runs op by op."""
    low_peak: bool = False
    """The backward uses less memory at the price of copies, see `low_peak_backward`."""
    chunks: int = 1
    """Number of chunks in which its widest part runs, see `chunks.chunked`."""
    inner_chunks: int = 1
    """Number of chunks in which the insides of layers run, see `chunks.part`."""


LoweredGraphs = dict[tuple[object, ...], LoweredRegion]
"""Earlier results of lowering one joint graph, by arguments."""


def lower_joint_graph(
    module: fx.GraphModule, num_forward_outputs: int, variant: JointVariant, *,
    cotangents: Sequence[bool], input_names: Sequence[str | None],
    hoisted: tuple[int, ...] | None = None, region: int = 0, block: str = "",
    elided: Collection[int] = (), known: LoweredGraphs | None = None,
) -> LoweredRegion:
    """The region, the step's `region`-th, of a joint graph in one variant; `module` is not changed.

    `cotangents`: true for the differentiable outputs that receive a gradient.  `input_names`: names
    of the parameters and buffers among the inputs, `None` for any other.  `hoisted`: the ops that a
    plan for Inductor has moved to the forward; `None` chooses them.  `elided`: outputs of the
    forward that nobody reads, which may be elided if they are made in chunks.  `block`: the
    submodule of the graph, empty for the whole model.  `known`: is added to, and made use of.
    """
    key = (region, block, variant, tuple(cotangents), None if hoisted is None else tuple(hoisted),
           tuple(elided))
    if known is not None and key in known:
        return known[key]
    joint = clean_joint_graph(module, num_forward_outputs, cotangents)
    cut = Chunked(joint, 1, 1, ())
    if variant.chunks > 1:
        cut = run_in_chunks(joint, variant.chunks, elided, variant.inner_chunks,
                            compiled=variant.compiled)
        joint = cut.joint
    if not variant.compiled:
        joint = make_results_fresh(joint)
    if variant.low_peak:
        lower_backward_peak(joint, compiled=variant.compiled)
    saved: frozenset[str] = frozenset()
    if variant.compiled:
        hoist_updates(joint)
        if hoisted is None:
            saved = saved_by_default(joint)
            hoisted = ops_to_hoist(joint, saved)
        hoist(joint, hoisted)
    Sizes.of(joint.primals).settle(joint.graph)
    lowered = lower(joint, _stable_names(input_names), region, block)
    lowered = replace(lowered, hoisted=hoisted or (), saved_by_default=saved,
                      chunks=cut.chunks, inner_chunks=cut.inner_chunks, elided=cut.elided)
    if known is not None:
        known[key] = lowered
    return lowered


def has_low_peak_variant(region: LoweredRegion) -> bool:
    """True if a region's backward has parts to copy."""
    return bool(late_parts(region.joint))


def _stable_names(known: Sequence[str | None]) -> list[str]:
    """Parameters and buffers by their qualified name, other inputs (`None`) numbered in order."""
    found, others = [], 0
    for name in known:
        if name is None:
            name = f"input:{others}"
            others += 1
        found.append(name)
    return found
