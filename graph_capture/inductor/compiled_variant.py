"""Inductor's treatment of the buffers of a captured step: the buffers that its own partitioner
saves, those that never leave a kernel, and the cost of writing one for the backward."""

from __future__ import annotations

from collections.abc import Sequence

from planner._graph_capture.inductor.fused_costs import FusedCosts, stays_in_one_kernel
from planner._graph_capture.inductor.within_kernels import buffer_of, within_kernels
from planner._graph_capture.joint_graph.lower import RESIDENT
from planner._graph_capture.step.regions import RegionUse
from planner._graph_capture.training_graph import SavingCosts, StepVariant, TrainingGraph


def compiled_variant(graph: TrainingGraph, uses: Sequence[RegionUse], costs: FusedCosts | None, *,
                     low_peak: bool) -> StepVariant:
    """The variant of a step that Inductor compiles; `costs`: `None` if time does not count."""
    return StepVariant(
        within_kernels(graph, uses), low_peak,
        saved_by_default=_saved_by_default(graph, uses),
        saving_costs=SavingCosts() if costs is None else _saving_costs(graph, uses, costs))


def _saving_costs(graph: TrainingGraph, uses: Sequence[RegionUse], costs: FusedCosts
                  ) -> SavingCosts:
    to_save, to_read = {}, {}
    for use in uses:
        in_one = stays_in_one_kernel(use.lowered)
        for op in use.lowered.ops[:use.lowered.num_forward]:
            seconds = costs.saving_seconds(op.node)
            for storage in op.outputs:
                buffer = buffer_of(graph, use.lowered, storage)
                to_read[buffer] = costs.reading_seconds(graph.buffers[buffer].size_bytes)
                if seconds and storage in in_one:
                    to_save[buffer] = seconds
    return SavingCosts(to_save, to_read)


def _saved_by_default(graph: TrainingGraph, uses: Sequence[RegionUse]) -> frozenset[int]:
    """Buffers that Inductor's own partitioner saves."""
    return frozenset(
        buffer_of(graph, use.lowered, storage)
        for use in uses for node, storage in use.lowered.storage_of.items()
        if node.name in use.lowered.saved_by_default and storage != RESIDENT
        and use.lowered.storages[storage].producer >= 0)
