"""Models wrapped for many ranks: the module inside, and the data parallelism of the run.

Model of the world: `DistributedDataParallel` contains the user's module, and is detected from
inside while its forward runs; `fully_shard` changes modules in place, which are then treated as
before sharding (`graph_capture.fake_copies.before_sharding`).

Blind spots: if modules are sharded in different ways, the first determines the settings; a
ZeroRedundancyOptimizer is counted as an optimizer of a part of the parameters.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.torch_compat import sharded_module, wrapping_data_parallel
from planner.arguments.parallel import DTYPES, DataParallel, dtype_named
from planner.arguments.planning import Planning

_NAMES = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}


def parallel_of(model: nn.Module) -> DataParallel | None:
    """Data parallelism of the model's run, as far as its wrappers show; `None`: a single rank."""
    if sharded_module(model) is not None:
        return _of_shards(model)
    running = _running(model)
    if running is None:
        return None
    ranks = running.process_group.size()
    return DataParallel("ddp", max(2, ranks), running.gradient_as_bucket_view)


def other_ranks(planned: DataParallel | None, model: nn.Module) -> str:
    """Reason why a plan for one rank of `planned` does not apply to this run; empty if it may."""
    if planned is None or not dist.is_available() or not dist.is_initialized():
        return ""
    found = parallel_of(model)
    # The group of a model that is not wrapped yet may be a part of all ranks.
    here = dist.get_world_size() if found is None else found.ranks
    fits = here == planned.ranks if found is not None else here % planned.ranks == 0
    # A rank of DistributedDataParallel has the same memory for any number of ranks.
    return "" if fits or planned.kind == "ddp" else (
        f"the plan is for one of {planned.ranks} ranks under {planned.kind}, and there are {here} "
        f"here, each of which holds more or less of the model: plan again with ranks={here}")


def group_of(model: nn.Module) -> list[int]:
    """Global ranks that train this model together, as far as its wrappers show."""
    if sharded_module(model) is not None:
        from planner._graph_capture.torch_compat.sharding import sharded_modules

        return dist.get_process_group_ranks(next(sharded_modules(model)).group)
    running = _running(model)
    return [] if running is None else dist.get_process_group_ranks(running.process_group)


def defers_reduction(model: nn.Module) -> bool:
    """True if `fully_shard` leaves the gradients of this step unreduced, for a later step to
    reduce."""
    if sharded_module(model) is None:
        return False
    from planner._graph_capture.torch_compat.sharding import sharded_modules

    return not all(each.reduces for each in sharded_modules(model))


def with_wrappers(model: nn.Module, planning: Planning) -> Planning:
    """The arguments with the data parallelism of the model's wrappers, unless the user gave one.

    Raises `ValueError` if the user's setting contradicts the wrappers.
    """
    found, given = parallel_of(model), planning.parallel
    if found is None:
        return planning
    if given is None:
        return replace(planning, parallel=found)
    if given.ranks != found.ranks and given.kind != "ddp":
        raise ValueError(f"parallel says {given.ranks} ranks, and the model is spread over "
                         f"{found.ranks}; leave parallel out, and the model tells")
    return planning


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def beneath_wrappers(model: nn.Module, parallel: DataParallel | None) -> nn.Module:
    """The model as a step computes with it: whole, in the dtype in which it is gathered.

    Raises `CaptureError` for a model that DeepSpeed has partitioned (ZeRO-3).
    """
    if any(hasattr(parameter, "ds_status") for parameter in model.parameters()):
        raise CaptureError(
            "the parameters of this model are partitioned by DeepSpeed (ZeRO stage 3), which "
            "gathers them by hooks of its own inside of every module, where they cannot be "
            "planned. Stages 1 and 2 can; or shard by torch's fully_shard in place of it: "
            'planner.within(model, ...) with accelerate\'s FSDP 2 or planner.DataParallel("fsdp2")')
    is_sharded = sharded_module(model) is not None
    dtype = None if parallel is None else dtype_named(parallel.param_dtype)
    if not is_sharded and dtype is None:
        return model
    from planner._graph_capture.fake_copies.before_sharding import before_sharding

    return before_sharding(model, dtype)


def _running(model: nn.Module) -> DistributedDataParallel | None:
    """What the model runs under."""
    found = model if isinstance(model, DistributedDataParallel) else wrapping_data_parallel()
    return found if isinstance(found, DistributedDataParallel) else None


def _of_shards(model: nn.Module) -> DataParallel:
    from planner._graph_capture.torch_compat.sharding import sharded_modules

    found = list(sharded_modules(model))
    inner = [each for each in found if any(each.names)]
    first = (inner or found)[0]
    kept = tuple(each.names[0] for each in inner if not each.reshards)
    keeps_all = len(kept) == len(inner) and not first.reshards
    return DataParallel(
        "fsdp2", first.group.size(),
        units=tuple(each.names[0] if len(each.names) == 1 else each.names for each in inner),
        reshard_after_forward=False if keeps_all else None, kept_units=() if keeps_all else kept,
        param_dtype=None if first.param_dtype is None else _NAMES[first.param_dtype],
        reduce_dtype=None if first.reduce_dtype is None else _NAMES[first.reduce_dtype],
        offloads=first.is_offloaded)
