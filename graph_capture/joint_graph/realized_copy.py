"""A copy that Inductor makes in its place.

Inductor computes values in the kernels that read them: an `aten.clone` of a part of a tensor
becomes part of its reader, and the whole stays alive until that runs.  An op unknown to Inductor is
called as it is, and its result is a buffer.
"""

from __future__ import annotations

import torch

from planner._graph_capture.torch_compat import OpOverload

_NAME = "checkpoint_planner::realized_copy"


def _copy(part: torch.Tensor) -> torch.Tensor:
    return part.clone()


# With the tag the operand may be a view of any layout: Inductor does not copy it into another
# first.
torch.library.define(_NAME, "(Tensor part) -> Tensor", tags=(torch.Tag.flexible_layout,))
torch.library.impl(_NAME, "CompositeExplicitAutograd", _copy)
torch.library.register_fake(_NAME, _copy)

REALIZED_COPY: OpOverload = torch.ops.checkpoint_planner.realized_copy.default
"""`realized_copy(part)`: a dense copy of `part` with strides in the same order."""
