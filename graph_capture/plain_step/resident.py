"""What is held before a step, storage by storage: parameters, buffers and inputs.

Blind spot: what one rank holds of a model in shards or buckets is known by its sum, and counts as
one block.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.memory.trace import Block, Category
from planner._graph_capture.torch_compat import pytree, storage_key
from planner._graph_capture.training_graph import ResidentMemory
from planner._graph_capture.twins.fake import FakeTwin


def resident_blocks(twin: FakeTwin, resident: ResidentMemory, *, is_sharded: bool = False
                    ) -> tuple[Block, ...]:
    """A block for each storage of the twin's parameters, buffers and inputs; what `resident` has
    beyond them is a block of its own.  `is_sharded`: a rank holds the parameters in another way."""
    seen: set[int] = set()
    blocks = _blocks(twin, Category.PARAMETERS, twin.parameters.items(), seen)
    if is_sharded:
        blocks = [Block(resident.parameters_bytes, Category.PARAMETERS,
                        label="parameters of this rank")]
    blocks += _blocks(twin, Category.BUFFERS, twin.buffers.items(), seen)
    inputs = [(f"input {number}", leaf) for number, leaf
              in enumerate(pytree.tree_leaves((twin.args, twin.kwargs)))
              if isinstance(leaf, torch.Tensor)]
    blocks += _blocks(twin, Category.INPUTS, inputs, seen)
    for category, total in ((Category.BUFFERS, resident.buffers_bytes),
                            (Category.INPUTS, resident.inputs_bytes)):
        rest = total - sum(b.size_bytes for b in blocks if b.category is category)
        if rest > 0:
            blocks.append(Block(rest, category, label="other tensors"))
    return tuple(blocks)


def _blocks(twin: FakeTwin, category: Category, named: Iterable[tuple[str, torch.Tensor]],
            seen: set[int]) -> list[Block]:
    blocks = []
    for name, whole in named:
        for tensor in strided_tensors([whole]):
            key = storage_key(tensor)
            if key not in seen:
                seen.add(key)
                size = allocated_bytes(tensor.untyped_storage().nbytes(), twin.device)
                blocks.append(Block(size, category, label=name))
    return blocks
