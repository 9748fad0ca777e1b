"""A copy that Inductor makes where it stands.

Inductor computes what it can in the kernels that read it: an `aten.clone` of a part of a tensor
becomes part of its reader, and the whole is held until that runs.  An op of which it knows nothing
is called as it is, and its result is a buffer.
"""

from __future__ import annotations

import torch

from planner._graph_capture.torch_compat import OpOverload

_NAME = "checkpoint_planner::realized_copy"


def _copy(part: torch.Tensor) -> torch.Tensor:
    return part.clone()


# With the tag the operand may be a view of any layout: it is not copied to be given another first.
torch.library.define(_NAME, "(Tensor part) -> Tensor", tags=(torch.Tag.flexible_layout,))
torch.library.impl(_NAME, "CompositeExplicitAutograd", _copy)
torch.library.register_fake(_NAME, _copy)

REALIZED_COPY: OpOverload = torch.ops.checkpoint_planner.realized_copy.default
"""`realized_copy(part)`: a copy of `part`, dense, its strides in the same order."""
