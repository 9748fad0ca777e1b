"""Memory timeline of data parallelism on one rank: FSDP2, ZeRO, and DistributedDataParallel.

The model of the world is that of `torch.distributed.fsdp.fully_shard`: each unit (modules that one
call wrapped, without the units inside them; the root is one) owns a shard of each parameter, padded
to equal sizes along the first dimension.  Before the forward of the first of its modules its
parameters are gathered into a flat buffer and copied out of it; the buffer stays until the next
unit has gathered, so that the two may overlap.  After the forward of all its modules the copies are
freed, unless the unit keeps them.  Before its backward
the parameters are gathered again, and the next unit's parameters are prefetched.  After its
backward the gradients are copied into a flat buffer and reduced into one shard per rank; that
buffer stays until the next unit reduces.

While the model is traced, these buffers are allocated as storage-less tensors when fully_shard
allocates real ones, so every storage tracker sees them.

With mixed precision the gathered parameters and the floating-point inputs of each unit are cast;
gradients are reduced in a dtype of their own and cast to that of the shards.

DDP's buckets exist from the start, so only the end of each gradient is traced: with
`gradient_as_bucket_view` it goes into its bucket as soon as it is computed.

Blind spots: DDP's broadcast of buffers at the start of the forward; memory that the communication
library keeps for a while after a collective; explicit prefetching of fully_shard; sharding over two
dimensions; a unit of several modules of which only some run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from planner._graph_capture.module_forward import removed_afterwards
from planner._graph_capture.rank import MakeBuffer, Wrapper
from planner._graph_capture.torch_compat import pytree
from planner._graph_capture.training_graph import Category


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a step that differ from those of the parameters."""

    shards: torch.dtype | None = None
    """Dtype of the shards and their gradients."""
    reduced: torch.dtype | None = None
    """Dtype in which gradients are reduced."""
    inputs: torch.dtype | None = None
    """Dtype to which floating-point inputs of a unit are cast."""


@dataclass(eq=False)
class ShardedUnit:
    """A group of parameters that are gathered together; mutable while a step is traced."""

    name: str
    """Qualified names of the wrapped modules; empty for the root."""
    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    reshard_after_forward: bool
    done: bool = False
    """True if its gradients were reduced in this backward."""
    in_backward: bool = False
    gathered: torch.Tensor | None = None
    """Flat buffer of parameters that are gathered and not copied out yet."""
    unsharded: torch.Tensor | None = None
    """The whole parameters."""
    to_run: list[nn.Module] = field(default_factory=list)
    """Modules whose forward has not ended, since the first one began."""
    order: list[int] = field(default_factory=list)
    """Its positions in the order of forwards."""

    def whole_bytes(self, ranks: int) -> int:
        """Bytes of its whole parameters, with the padding."""
        return ranks * sum(padded_shard_bytes(p, ranks) for p in self.parameters)


def padded_shard_bytes(parameter: torch.Tensor, ranks: int, dtype: torch.dtype | None = None
                       ) -> int:
    """Bytes of one rank's padded shard; `dtype` replaces the dtype of floating-point parameters."""
    if parameter.dim() == 0:
        raise ValueError("fully_shard cannot shard a parameter without dimensions")
    rows = math.ceil(parameter.shape[0] / ranks)
    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    return rows * math.prod(parameter.shape[1:]) * kind.itemsize


def make_units(model: nn.Module, names: Sequence[tuple[str, ...]],
               reshard_after_forward: bool | None, kept: Collection[str] = ()
               ) -> tuple[ShardedUnit, ...]:
    """The units of a model, from the names of the submodules of each; the root comes first.

    `reshard_after_forward`: as for `fully_shard`; `None`: every unit but the root.  `kept`: modules
    whose units do not reshard in either case.
    """
    units = (("",), *names)
    unit_of = {name: unit for unit in units for name in unit}
    owner: dict[int, tuple[str, ...]] = {}
    for name in sorted(unit_of, key=len, reverse=True):  # inner modules first
        for parameter in model.get_submodule(name).parameters():
            owner.setdefault(id(parameter), unit_of[name])
    made = []
    for unit in units:
        modules = tuple(model.get_submodule(name) for name in unit)
        parameters = dict.fromkeys(p for module in modules for p in module.parameters()
                                   if owner[id(p)] == unit)
        reshards = any(unit) if reshard_after_forward is None else reshard_after_forward
        made.append(ShardedUnit(", ".join(unit), modules, tuple(parameters),
                                reshards and not any(name in kept for name in unit)))
    return tuple(made)


class Sharded(Wrapper):
    """Fully sharded parameters, gradients and optimizer state: allocates and frees the buffers of
    one rank while the model runs."""

    def __init__(self, units: Sequence[tuple[str, ...]], ranks: int, *,
                 reshard_after_forward: bool | None = None, kept: Collection[str] = (),
                 library_copies: bool = False, precision: Precision | None = None) -> None:
        """`units`, `reshard_after_forward`, `kept`: see `make_units`; `library_copies`: the
        communication library copies each buffer that it gathers or reduces, as gloo does and NCCL
        does not."""
        self.precision, self.ranks = precision or Precision(), ranks
        self._make_units = partial(make_units, names=units, kept=kept,
                                   reshard_after_forward=reshard_after_forward)
        self._library_copies = library_copies
        self._make: MakeBuffer | None = None

    @contextlib.contextmanager
    def attached(self, model: nn.Module, make: MakeBuffer) -> Iterator[None]:
        self._make, self.units = make, self._make_units(model)
        self.sharded_gradients: list[torch.Tensor] = []
        """The gradient shards, which stay after the backward."""
        self._last_gathered: torch.Tensor | None = None
        self._reducing: torch.Tensor | None = None
        self._forwards: list[ShardedUnit] = []
        hooks = [hook for unit in self.units for module in unit.modules for hook in (
            module.register_forward_pre_hook(
                torch.compiler.disable(partial(self._pre_forward, unit)), prepend=True,
                with_kwargs=True),
            module.register_forward_hook(
                torch.compiler.disable(partial(self._post_forward, unit))))]
        try:
            with removed_afterwards(hooks):
                yield
        finally:
            # Autograd's nodes keep this object alive, and the caller may keep the nodes alive: the
            # garbage collector does not see such cycles.
            self._make = None

    def finish(self) -> list[torch.Tensor]:
        for unit in self.units:
            if not unit.done:  # no gradient flowed into its inputs
                self._post_backward(unit)
        self._reducing = None
        for unit in self.units:
            unit.gathered, unit.done = None, False
            unit.to_run.clear()
            unit.order.clear()
        self._forwards.clear()
        gradients, self.sharded_gradients = self.sharded_gradients, []
        return gradients

    def _buffer(self, size_bytes: int, kind: Category) -> torch.Tensor:
        assert self._make is not None
        return self._make(size_bytes, kind)

    def _gather(self, unit: ShardedUnit) -> None:
        if unit.gathered is None and unit.unsharded is None and unit.parameters:
            cast = None
            if self.precision.shards is not None:
                cast = self._buffer(unit.whole_bytes(self.ranks) // self.ranks,
                                    Category.TEMPORARIES)
            unit.gathered = self._buffer(unit.whole_bytes(self.ranks), Category.TEMPORARIES)
            del cast
            self._communicate(unit.gathered)

    def _communicate(self, buffer: torch.Tensor) -> None:
        if self._library_copies:
            self._buffer(buffer.numel(), Category.TEMPORARIES)  # and released at once

    def _copy_out(self, unit: ShardedUnit, *, forward: bool) -> None:
        if unit.gathered is None:
            return
        if forward:
            self._last_gathered = None
        unit.unsharded = self._buffer(unit.whole_bytes(self.ranks), Category.PARAMETERS)
        if forward:
            self._last_gathered = unit.gathered
        unit.gathered = None

    def _pre_forward(self, unit: ShardedUnit, module: nn.Module, args: tuple[Any, ...],
                     kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        is_first = not unit.to_run
        if is_first:
            unit.to_run = list(unit.modules)
        with torch.no_grad():
            self._gather(unit)
            self._copy_out(unit, forward=True)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        dtype = self.precision.inputs
        if dtype is not None:
            leaves = [leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
                      else leaf for leaf in leaves]
        places = [place for place, leaf in enumerate(leaves)
                  if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if is_first and places and torch.is_grad_enabled():
            passed = _Passage.apply(partial(self._post_backward, unit),
                                    *(leaves[place] for place in places))
            for place, leaf in zip(places, passed, strict=True):
                leaves[place] = leaf
        return pytree.tree_unflatten(leaves, structure)

    def _post_forward(self, unit: ShardedUnit, module: nn.Module, args: object,
                      output: Any) -> Any:
        if module in unit.to_run:
            unit.to_run.remove(module)
        if unit.to_run:
            return output
        if unit.reshard_after_forward:
            unit.unsharded = None
        unit.order.append(len(self._forwards))
        self._forwards.append(unit)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._pre_backward, unit))
        if not unit.name:
            self._last_gathered = None
        return output

    def _pre_backward(self, unit: ShardedUnit, gradient: torch.Tensor) -> torch.Tensor:
        if not unit.in_backward:
            unit.in_backward, unit.done = True, False
            with torch.no_grad():
                self._gather(unit)
                self._copy_out(unit, forward=False)
                if unit.order:
                    place = unit.order.pop()
                    if place > 0:
                        self._gather(self._forwards[place - 1])
        return gradient

    def _post_backward(self, unit: ShardedUnit) -> None:
        unit.in_backward, unit.done = False, True
        with_gradient = [p for p in unit.parameters if p.grad is not None]
        unit.unsharded = None
        self._reducing = None
        if not with_gradient:
            return
        with torch.no_grad():
            reduced, shards = self.precision.reduced, self.precision.shards
            reduced_bytes, shard_bytes = (
                sum(padded_shard_bytes(p, self.ranks, dtype) for p in with_gradient)
                for dtype in (reduced, shards))
            self._reducing = self._buffer(self.ranks * reduced_bytes, Category.TEMPORARIES)
            for parameter in with_gradient:
                parameter.grad = None
            output = None
            if shards is not None and reduced is not shards:
                output = self._buffer(reduced_bytes, Category.TEMPORARIES)
                self._communicate(self._reducing)
            self.sharded_gradients.append(self._buffer(shard_bytes, Category.GRADIENTS))
            if output is None:
                self._communicate(self._reducing)


class _Passage(torch.autograd.Function):
    """Passes tensors through; calls back when all their gradients are computed."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.callback()
        return (None, *gradients)


class IntoBuckets(Wrapper):
    """Frees each gradient once it is computed: it is in its bucket (`gradient_as_bucket_view`)."""

    def attached(self, model: nn.Module, make: MakeBuffer) -> AbstractContextManager[None]:
        return removed_afterwards([parameter.register_post_accumulate_grad_hook(_release_gradient)
                                   for parameter in model.parameters() if parameter.requires_grad])


def _release_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
