"""Layout of the model on one rank: parameters, buckets, shards, and the optimizer's share.

A layout (see `graph_capture.rank`) gives the memory of the model on one rank, independent of the
step: bytes of parameters, of resident gradients (in buckets that they are views of) and of resident
buffers (buckets separate from the gradients).  Its `wrapper` runs with the traced step, and its
`share_of` gives the optimizer of the rank with the largest state.
"""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from planner._graph_capture.data_parallel.fully_sharded import (
    IntoBuckets,
    Precision,
    Sharded,
    make_units,
    padded_shard_bytes,
)
from planner._graph_capture.dynamo.blocks import (
    REPEATED_BLOCKS,
    WHOLE_MODEL,
    find_blocks,
    repeated_blocks,
)
from planner._graph_capture.fake_copies.fake import FakeCopy, make_fake_copy
from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.optimizer.named import instances
from planner._graph_capture.rank import Wrapper
from planner._graph_capture.training_graph import ResidentMemory
from planner.arguments.parallel import DataParallel, dtype_named

_FIRST_BUCKET_BYTES = 2 ** 20
_BUCKET_BYTES = 25 * 2 ** 20
_MIB = 2 ** 20


class _Layout:
    """Base of the layouts."""

    parameters_bytes: int
    gradients_bytes: int = 0
    """Bytes of buckets that the gradients are views of."""
    communication_bytes: int = 0
    """Bytes of buckets separate from the gradients."""
    bucket_bytes: tuple[int, ...] = ()
    units: tuple[tuple[str, int], ...] = ()
    holds_optimizer: bool = True
    reduced_dtype: torch.dtype | None = None
    """Dtype in which gradients are reduced, if different from theirs."""

    def __init__(self, model: nn.Module, fake_copy: FakeCopy, parallel: DataParallel) -> None:
        self._model, self._fake_copy, self._parallel = model, fake_copy, parallel

    @property
    def whole_gradient_bytes(self) -> int:
        """See `graph_capture.rank.RankLayout`; in the dtype in which they will be reduced."""
        dtype = self.reduced_dtype
        return sum(allocated_bytes(p.numel() * (dtype or p.dtype).itemsize, self._fake_copy.device)
                   for p in self._fake_copy.model.parameters() if p.requires_grad)

    @property
    def resident(self) -> ResidentMemory:
        """Memory allocated between steps; buckets count as buffers."""
        held = self._fake_copy.resident
        return ResidentMemory(
            self.parameters_bytes,
            held.buffers_bytes + self.gradients_bytes + self.communication_bytes,
            held.inputs_bytes)


class Replicated(_Layout):
    """Each rank has the whole model, and buckets for its gradients (`ddp`, `zero1`)."""

    def __init__(self, model: nn.Module, fake_copy: FakeCopy, parallel: DataParallel) -> None:
        super().__init__(model, fake_copy, parallel)
        self.parameters_bytes = fake_copy.resident.parameters_bytes
        self.bucket_bytes = tuple(
            allocated_bytes(size, fake_copy.device)
            for size in assign_buckets([p for p in fake_copy.model.parameters() if p.requires_grad],
                                       parallel.bucket_cap_mb))
        whole = sum(self.bucket_bytes)
        self.gradients_bytes = whole if parallel.gradient_as_bucket_view else 0
        self.communication_bytes = whole - self.gradients_bytes

    def wrapper(self) -> Wrapper:
        return IntoBuckets() if self._parallel.gradient_as_bucket_view else Wrapper()

    def share_of(self, optimizer: object) -> tuple[object, FakeCopy]:
        """See `graph_capture.rank.RankLayout`."""
        if self._parallel.kind == "ddp":
            return optimizer, self._fake_copy
        parts = partition([p for p in self._model.parameters() if p.requires_grad],
                          self._parallel.ranks)
        most = max(parts, key=lambda part: sum(p.numel() for p in part))
        return _share({p: p.shape for p in most}, optimizer, self._fake_copy.device)


class FullyShardedLayout(_Layout):
    """Each rank has a shard of each parameter (`zero2`, `zero3`, `fsdp2`)."""

    def __init__(self, model: nn.Module, fake_copy: FakeCopy, parallel: DataParallel) -> None:
        super().__init__(model, fake_copy, parallel)
        self._reshard = {"zero2": False, "zero3": True}.get(
            parallel.kind, parallel.reshard_after_forward)
        self._names = unit_names(fake_copy.model, parallel.units)
        self._kept = frozenset(_named(
            parallel.kept_units, [name for unit in self._names for name in unit], "kept_units"))
        units = make_units(fake_copy.model, self._names, self._reshard, self._kept)
        self._precision = _precision(model, parallel)
        self.reduced_dtype = self._precision.reduced
        # Offloaded parameters are in host memory, which on a CPU is the device's own, too.
        self.holds_optimizer = not parallel.offloads or fake_copy.device.type == "cpu"
        self.parameters_bytes = 0 if not self.holds_optimizer else sum(
            allocated_bytes(padded_shard_bytes(p, parallel.ranks, self._precision.shards),
                            fake_copy.device) for unit in units for p in unit.parameters)
        self.units = tuple((unit.name, unit.whole_bytes(parallel.ranks))
                           for unit in (*units[1:], units[0]))

    def wrapper(self) -> Wrapper:
        return Sharded(self._names, self._parallel.ranks, reshard_after_forward=self._reshard,
                       kept=self._kept,
                       library_copies=self._fake_copy.device.type == "cpu",  # gloo
                       precision=self._precision)

    def share_of(self, optimizer: object) -> tuple[object, FakeCopy]:
        """See `graph_capture.rank.RankLayout`."""
        ranks, given = self._parallel.ranks, instances(optimizer)
        # While a model runs, some of its parameters are gathered; no optimizer refers to those.
        parameters = self._model.parameters() if given is None else (
            p for each in given for group in each.param_groups for p in group["params"])
        shards: dict[torch.Tensor, torch.Size] = {
            p: torch.Size((math.ceil(p.shape[0] / ranks), *p.shape[1:]))
                  for p in parameters if p.requires_grad}
        return _share(shards, optimizer, self._fake_copy.device, self._precision.shards)


def _precision(model: nn.Module, parallel: DataParallel) -> Precision:
    if parallel.param_dtype is None and parallel.reduce_dtype is None:
        return Precision()
    floats = [p for p in model.parameters() if p.is_floating_point()]
    shards = next((p for p in floats if hasattr(p, "device_mesh")), floats[0]).dtype
    computed = dtype_named(parallel.param_dtype) or shards
    return Precision(shards, dtype_named(parallel.reduce_dtype) or computed,
                     dtype_named(parallel.param_dtype))


def layout_of(model: nn.Module, fake_copy: FakeCopy, parallel: DataParallel
              ) -> Replicated | FullyShardedLayout:
    """The layout, on a rank under `parallel`, of the model that the fake copy was made from."""
    return (Replicated if parallel.is_replicated else FullyShardedLayout)(
        model, fake_copy, parallel)


def assign_buckets(parameters: Sequence[torch.Tensor], cap_mb: float | None) -> list[int]:
    """Sizes of DDP's buckets for the gradients of these parameters: filled in reverse order, each
    bucket is closed when it reaches its limit.

    Blind spot: after its first step the reducer orders by when gradients were ready; that changes
    the contents of buckets, not their total size.
    """
    first = _FIRST_BUCKET_BYTES if cap_mb is None else int(cap_mb * _MIB)
    limit = _BUCKET_BYTES if cap_mb is None else first
    closed: list[int] = []
    filling: dict[tuple[torch.dtype, torch.device], int] = {}
    seen: set[tuple[torch.dtype, torch.device]] = set()
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        size = filling.pop(kind, 0) + parameter.numel() * parameter.element_size()
        if size >= (limit if kind in seen else first):
            seen.add(kind)
            closed.append(size)
        else:
            filling[kind] = size
    return closed + list(filling.values())


def partition(parameters: Sequence[torch.Tensor], ranks: int) -> list[list[torch.Tensor]]:
    """Partition whole parameters over ranks like ZeroRedundancyOptimizer: the largest first, each
    to the rank with the least."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=lambda p: p.numel(), reverse=True):
        rank = sizes.index(min(sizes))
        parts[rank].append(parameter)
        sizes[rank] += parameter.numel()
    return parts


def unit_names(model: nn.Module, patterns: Sequence[str | tuple[str, ...]] | None
               ) -> tuple[tuple[str, ...], ...]:
    """Names of the modules of each unit.

    Raises `ValueError` for a pattern that names no module with parameters, and for a module in two
    units.
    """
    having = {name: module for name, module in model.named_modules()
              if name and any(True for _ in module.parameters())}
    if patterns is None:
        lists = [name for name, module in having.items() if isinstance(module, nn.ModuleList)]
        outermost = [name for name in lists
                     if not any(name.startswith(f"{other}.") for other in lists)]
        return tuple((name,) for name in having
                     if name.rpartition(".")[0] in outermost and name.rpartition(".")[0])
    chosen: list[tuple[str, ...]] = []
    for entry in patterns:
        found = _named([entry] if isinstance(entry, str) else entry, having, "units")
        chosen += [unit for unit in ([(name,) for name in found] if isinstance(entry, str)
                                     else [found]) if unit not in chosen]
    names = [name for unit in chosen for name in unit]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"units: {twice!r} is in two units; name it once")
    return tuple(chosen)


def _named(patterns: Sequence[str], names: Collection[str], setting: str) -> tuple[str, ...]:
    """The names that any of the patterns matches, once each."""
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)
                 and name.count(".") == pattern.count(".")]
        if not found:
            raise ValueError(f"{setting}: {pattern!r} names no "
                             f"{'unit' if setting == 'kept_units' else 'module with parameters'}; "
                             f"there are {', '.join(list(names)[:5])}, ...")
        chosen.update(dict.fromkeys(found))
    return tuple(chosen)


def regions_of_rank(model: nn.Module, parallel: DataParallel,
                    regions: str | Sequence[str] | None) -> str | Sequence[str]:
    """The regions that are compiled on a rank; `regions`: as for `planner.plan`.

    The default is the repeated blocks, if any: a single graph would deliver all gradients at its
    end, leaving no computation to overlap with communication, and units are gathered and released
    between regions.  Without such blocks it is the units that contain modules.  Raises `ValueError`
    for a unit inside a region.
    """
    units = [] if parallel.is_replicated else [
        name for names in unit_names(model, parallel.units) for name in names]
    default = REPEATED_BLOCKS if repeated_blocks(model) else tuple(
        unit for unit in units if unit and any(model.get_submodule(unit).children()))
    chosen = regions or default or WHOLE_MODEL
    if not units:
        return chosen
    blocks = find_blocks(model, chosen) or ("",)
    for unit in units:
        inside = next((block for block in blocks if unit.startswith(f"{block}." if block else "")
                       and unit != block), None)
        if inside == "":
            raise ValueError(
                f"under {parallel.kind} the unit {unit} is gathered and released by itself, so the "
                f'model cannot be compiled as a unit: {"leave out regions, or " if regions else ""}'
                'write regions="blocks" or names of modules such as the units')
        if inside is not None:
            raise ValueError(
                f"the unit {unit} lies inside of {inside}, which is compiled as a unit: write "
                f"units=({inside!r},) or a wildcard for it and its like, or regions=({unit!r},)")
    return chosen


def _share(shapes: Mapping[torch.Tensor, torch.Size], optimizer: object, device: torch.device,
           dtype: torch.dtype | None = None) -> tuple[object, FakeCopy]:
    """The optimizer on shards of its parameters; `dtype`: of floating-point shards, if
    different."""
    part_of = {id(p): nn.Parameter(torch.empty(
        shape, dtype=dtype if dtype and p.is_floating_point() else p.dtype, device="meta"))
               for p, shape in shapes.items()}
    if (given := instances(optimizer)) is not None:
        optimizer = [_moved(each, part_of) for each in given]
    shards = nn.Module()
    shards.parts = nn.ParameterList(part_of.values())
    return optimizer, make_fake_copy(shards, device=device)


def _moved(optimizer: Optimizer, part_of: Mapping[int, nn.Parameter]) -> Optimizer:
    """An optimizer of the same groups and settings on the shards, without state."""
    moved = object.__new__(type(optimizer))
    vars(moved).update(vars(optimizer))
    moved.param_groups = [
        {**group, "params": [part_of[id(p)] for p in group["params"] if id(p) in part_of]}
        for group in optimizer.param_groups]
    moved.state = defaultdict(dict)
    return moved
