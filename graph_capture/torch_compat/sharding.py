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
class ShardedModules:
    """Modules to which one call of `fully_shard` was applied."""

    names: tuple[str, ...]
    """Qualified names; an empty one for the model itself."""
    group: dist.ProcessGroup
    """The ranks over which its parameters are sharded."""
    reshards: bool
    """True if it frees its whole parameters after its forward."""
    param_dtype: torch.dtype | None
    """Dtype of the whole parameters, if it differs from that of the shards."""
    reduce_dtype: torch.dtype | None
    """Dtype in which gradients are reduced, if it differs from theirs."""
    is_offloaded: bool
    """True if the shards are in the host's memory."""
    reduces: bool
    """True if this step reduces its gradients; otherwise they stay whole until a later one does
    (`set_requires_gradient_sync(False)`)."""


def sharded_modules(model: nn.Module) -> Iterator[ShardedModules]:
    """The modules of a model to which `fully_shard` was applied, by call, in the order of
    `named_modules`."""
    names: dict[Any, list[str]] = {}  # by the state that modules of one call share
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            names.setdefault(module._get_fsdp_state(), []).append(name)
    for state, found in names.items():
        group = state._fsdp_param_group
        if group is None:  # It has no parameters of its own.
            continue
        policy = state._mp_policy
        yield ShardedModules(
            tuple(found), group.mesh_info.shard_process_group,
            group.post_forward_mesh_info is not None,
            policy.param_dtype, policy.reduce_dtype,
            type(group.offload_policy).__name__ == "CPUOffloadPolicy", group.reduce_grads)


def class_before(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before `fully_shard`."""
    kind = type(module)
    if not isinstance(module, FSDPModule):
        return kind
    # The class is derived from FSDPModule, or a subclass of it, and the former class.
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]


def is_of_sharding(name: str, value: object) -> bool:
    """True if `fully_shard` added this attribute of a module, or this hook (without a name)."""
    if name.startswith(("__composable_api", "_is_fsdp_managed", "_fsdp_use_orig_params")):
        return True
    owner = getattr(value, "__self__", value)
    return any(str(getattr(each, "__module__", "")).startswith("torch.distributed.fsdp")
               for each in (type(owner), value))


def is_shard(tensor: torch.Tensor) -> bool:
    """True if a parameter is sharded."""
    return isinstance(tensor, DTensor)
