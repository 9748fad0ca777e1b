"""The state of a model under `torch.distributed.fsdp.fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from planner._graph_capture.torch_compat.requirements import require

require(__name__)


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """A module to which `fully_shard` was applied."""

    name: str
    """Qualified; empty for the model itself."""
    group: dist.ProcessGroup
    """The ranks over which its parameters are sharded."""
    reshards: bool
    """True if it lets its whole parameters go after its forward."""
    param_dtype: torch.dtype | None
    """Of the whole parameters, where that is another than that of the shards."""
    reduce_dtype: torch.dtype | None
    """Of the gradients that are reduced, where that is another than theirs."""
    is_offloaded: bool
    """True if the shards lie in the host's memory."""
    reduces: bool
    """True if this step reduces its gradients; else they stay whole for a later one to do so
    (`set_requires_gradient_sync(False)`)."""


def sharded_modules(model: nn.Module) -> Iterator[ShardedModule]:
    """The modules of a model to which `fully_shard` was applied, in the order of
    `named_modules`."""
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        group = state._fsdp_param_group
        if group is None:  # It has no parameters of its own.
            continue
        policy = state._mp_policy
        yield ShardedModule(
            name, group.mesh_info.shard_process_group, group.post_forward_mesh_info is not None,
            policy.param_dtype, policy.reduce_dtype,
            type(group.offload_policy).__name__ == "CPUOffloadPolicy", group.reduce_grads)


def class_before(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before `fully_shard`."""
    kind = type(module)
    if not isinstance(module, FSDPModule):
        return kind
    # Its class is made of FSDPModule, perhaps of a kind of it, and the former class.
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]


def is_of_sharding(name: str, value: object) -> bool:
    """Return whether an attribute of a module, or a hook (of no name), was put there by
    `fully_shard`."""
    if name.startswith(("__composable_api", "_is_fsdp_managed", "_fsdp_use_orig_params")):
        return True
    owner = getattr(value, "__self__", value)
    return any(str(getattr(each, "__module__", "")).startswith("torch.distributed.fsdp")
               for each in (type(owner), value))


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether a parameter is there in shards."""
    return isinstance(tensor, DTensor)
