"""The store through which the processes of a group exchange small values."""

from __future__ import annotations

import torch.distributed as dist

from planner._graph_capture.torch_compat.requirements import require

require(__name__)


def default_store() -> dist.Store:
    """The store of the default process group, which must exist."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store
