"""The size-independent signature of a lowered region, which shows if a plan for one batch serves
another.

Two regions of equal structure have ops of the same names that read, make and may overwrite the same
storages; so a schedule of the one is a schedule of the other, with the same lifetimes.
"""

from __future__ import annotations

import torch

from planner._graph_capture.joint_graph.lower import LoweredRegion
from planner._graph_capture.joint_graph.naming import describe_value, digest
from planner._graph_capture.training_graph import RegionSignature


def region_signature(region: LoweredRegion) -> RegionSignature:
    """The structure of a region, and its sizes."""
    joint = region.joint
    parts = [f"{op.name} {op.structure} {op.inputs} {op.outputs} {op.inplace} "
             f"{op.replay.pinned} {op.replay.random} {len(op.replay.copied_inputs)}"
             for op in region.ops]
    parts.append(f"{region.num_forward} {region.mutation_sources} {region.held_outputs} "
                 f"{region.gradient_storages} {region.cotangent_storages}")
    return RegionSignature(
        structure=digest(*parts),
        storage_bytes=tuple(storage.size_bytes for storage in region.storages),
        input_bytes=tuple(int(primal.meta["val"].untyped_storage().nbytes())
                          for primal in joint.primals
                          if isinstance(primal.meta["val"], torch.Tensor)),
        input_layout=digest(*(describe_value(primal.meta["val"]) for primal in joint.primals)))
