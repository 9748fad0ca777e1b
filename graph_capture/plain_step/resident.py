"""The storages that are alive before a step: parameters, buffers and inputs.

Blind spot: of a rank's shards or buckets only the sum is known, and counts as one block.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.memory.trace import Block, Category
from planner._graph_capture.torch_compat import pytree, storage_key
from planner._graph_capture.training_graph import ResidentMemory


def resident_blocks(fake_copy: FakeCopy, resident: ResidentMemory, *, is_sharded: bool = False
                    ) -> tuple[Block, ...]:
    """A block for each storage of the fake copy's parameters, buffers and inputs; other memory in
    `resident` is a block of its own.  `is_sharded`: the parameters are sharded or bucketed on this
    rank."""
    seen: set[int] = set()
    blocks = _blocks(fake_copy, Category.PARAMETERS, fake_copy.parameters.items(), seen)
    if is_sharded:
        blocks = [Block(resident.parameters_bytes, Category.PARAMETERS,
                        label="parameters of this rank")]
    blocks += _blocks(fake_copy, Category.BUFFERS, fake_copy.buffers.items(), seen)
    inputs = [(f"input {number}", leaf) for number, leaf
              in enumerate(pytree.tree_leaves((fake_copy.args, fake_copy.kwargs)))
              if isinstance(leaf, torch.Tensor)]
    blocks += _blocks(fake_copy, Category.INPUTS, inputs, seen)
    for category, total in ((Category.BUFFERS, resident.buffers_bytes),
                            (Category.INPUTS, resident.inputs_bytes)):
        rest = total - sum(b.size_bytes for b in blocks if b.category is category)
        if rest > 0:
            blocks.append(Block(rest, category, label="other tensors"))
    return tuple(blocks)


def _blocks(fake_copy: FakeCopy, category: Category, named: Iterable[tuple[str, torch.Tensor]],
            seen: set[int]) -> list[Block]:
    blocks = []
    for name, whole in named:
        for tensor in strided_tensors([whole]):
            key = storage_key(tensor)
            if key not in seen:
                seen.add(key)
                size = allocated_bytes(tensor.untyped_storage().nbytes(), fake_copy.device)
                blocks.append(Block(size, category, label=name))
    return blocks
