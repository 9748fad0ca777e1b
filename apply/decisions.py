"""The decisions of a plan for a block: all that its code depends on except the captured graph."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner._apply.rewrite_spec import OpKey, RegionSpec, RewriteSpec


def decisions_of(spec: RewriteSpec, regions: Sequence[int]) -> tuple[object, ...]:
    """The decisions for these regions of a block; they are equal for blocks that may share code."""
    return tuple(_decisions(spec.regions[index], index) for index in regions)


def _decisions(region: RegionSpec, index: int) -> object:
    def local(name: str) -> str:
        """Return the op's name within the block."""
        bare = name.removeprefix(f"{index}:")
        mark = "~" if bare.startswith("~") else ""
        return mark + bare.removeprefix(mark).removeprefix(region.block)

    def ops(keys: tuple[OpKey, ...]) -> tuple[tuple[str, str], ...]:
        return tuple((local(key.name), key.result) for key in keys)

    sizes = region.region_signature and (
        region.region_signature.storage_bytes,
        region.region_signature.input_bytes,
    )
    return (ops(region.forward), ops(region.backward), region.cotangents, sizes, region.hoisted,
            tuple((local(group.before), tuple(
                msgspec.structs.replace(action, op=local(action.op)) for action in group.actions))
                  for group in region.insertions),
            tuple((local(reuse.op), reuse.run, reuse.candidate) for reuse in region.inplace_reuses))
