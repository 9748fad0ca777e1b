"""Dummy inputs on which an op is run to be measured.

The model of the world: the workspace and the duration of a kernel depend on the layouts of its
tensors, not on their values, as long as these are ordinary numbers and valid indices.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from planner._graph_capture.memory.sparse import is_sparse, strided_tensors
from planner._graph_capture.op_costs.isolated import Layout
from planner._graph_capture.torch_compat import OpOverload, pytree, schema_of


class Materializer:
    """Dummy inputs in place of fake tensors; the same tensor for the same one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, torch.Tensor] = {}
        self._numbers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._random = torch.Generator(device=device).manual_seed(0)

    def renew(self) -> None:
        """Restore the numbers, which may have been overwritten."""
        for rows, pattern in self._numbers:
            rows.copy_(pattern)

    def tree(self, value: Any) -> Any:
        return pytree.tree_map(self._leaf, value)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | Layout):
            if id(leaf) not in self._made:
                self._made[id(leaf)] = (
                    self._sparse(leaf) if isinstance(leaf, torch.Tensor) and is_sparse(leaf)
                    else self._real(leaf))
            return self._made[id(leaf)]
        if isinstance(leaf, torch.device):
            return self._device
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return leaf.node.hint
        return leaf

    def _sparse(self, known: torch.Tensor) -> torch.Tensor:
        values, indices = strided_tensors(known)
        with warnings.catch_warnings():  # torch 2.11 warns even if the checks are disabled
            warnings.filterwarnings("ignore", "Sparse invariant checks")
            made = torch.sparse_coo_tensor(indices.to(self._device, copy=True),
                                           self._real(values), known.shape, check_invariants=False)
        return made._coalesced_(known.is_coalesced())

    def _real(self, fake: torch.Tensor | Layout) -> torch.Tensor:
        count = extent(fake)
        if fake.dtype.is_floating_point or fake.dtype.is_complex:
            # A small random pattern, repeated: random numbers cost more than most ops.
            pattern = torch.rand(min(count, 4096), generator=self._random, device=self._device)
            flat = pattern.to(fake.dtype).repeat(-(-count // 4096) or 1)
            self._numbers.append((flat.view(-1, max(len(pattern), 1)), pattern))
        else:
            flat = torch.zeros(count, dtype=fake.dtype, device=self._device)  # a valid index
        return flat.as_strided(ints(fake.shape), ints(strides(fake)))


def seeds_on_host(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with random state in host memory: memory efficient attention reads it there,
    whatever fake tensors say, and a wrong address ends the process."""
    if "_efficient_attention_backward" not in schema_of(op).name:
        return args
    return tuple(value.cpu() if isinstance(value, torch.Tensor) and each.name.startswith("philox")
                 else value for each, value in zip(schema_of(op).arguments, args, strict=False))


def ints(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def strides(tensor: torch.Tensor | Layout) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def extent(tensor: torch.Tensor | Layout) -> int:
    """Elements from the first to the last that the tensor reaches."""
    if any(size == 0 for size in tensor.shape):
        return 0
    return 1 + sum((int(size) - 1) * int(stride)
                   for size, stride in zip(tensor.shape, strides(tensor), strict=True))
