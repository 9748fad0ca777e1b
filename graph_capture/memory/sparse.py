"""Sparse tensors in coordinate form: the tensors with their memory, and ops on them without values.

`nn.Embedding(sparse=True)` makes such gradients: the rows that the batch has touched, and their
indices.  The number of distinct rows depends on values, so the indices keep theirs if those of the
batch are known; otherwise all rows count as distinct, which is the maximum.

Blind spot: a sparse gradient that is added to another one, which grows with every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from planner._graph_capture.errors import CaptureError
from planner._graph_capture.torch_compat import (
    OpOverload,
    is_traceable_wrapper_subclass,
    no_active_modes,
    pytree,
)

MAKE_SPARSE = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
_QUESTIONS = frozenset({torch.ops.aten.is_coalesced.default, torch.ops.aten._nnz.default,
                        torch.ops.aten.sparse_dim.default, torch.ops.aten.dense_dim.default})
_FOLLOWED = frozenset({torch.ops.aten.clone.default, torch.ops.aten._coalesce.default,
                       torch.ops.aten.sparse_mask.default})
"""Ops that read values and write none of their operands: they may run on values of zero."""


def is_sparse(value: object) -> bool:
    """True for a sparse tensor in coordinate form."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout,
                     torch.memory_format})


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a pytree; for the arguments of an op several times faster than torch's."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return [leaf for each in tree for leaf in leaves_of(each)]
    if kind is dict:
        return [leaf for each in tree.values() for leaf in leaves_of(each)]
    return [tree] if kind in _LEAVES or isinstance(tree, torch.Tensor) else pytree.tree_leaves(tree)


def strided_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree that have a storage: values and indices in place of a sparse tensor,
    the inner tensors in place of a wrapper subclass."""
    found: list[torch.Tensor] = []
    for leaf in leaves_of(tree):
        if is_sparse(leaf):
            with no_active_modes():
                found += (leaf._values(), leaf._indices())
        elif is_traceable_wrapper_subclass(leaf):
            found += strided_tensors([inside for _, inside in tensors_inside(leaf)])
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


def tensors_inside(tensor: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor itself, or the inner tensors of a wrapper subclass with their names in it."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        yield from tensors_inside(getattr(tensor, attribute), f"{name}.{attribute}")


def run_sparse(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
               is_known: Callable[[torch.Tensor], bool],
               without_values: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The result of an op that reads or makes a sparse tensor: indices have values, values have
    none.

    `without_values`: a tensor of the same layout with a new storage.  Raises `CaptureError` for an
    op whose result needs values.
    """
    if func in _QUESTIONS:
        return func(*args, **kwargs)
    if func is MAKE_SPARSE:
        indices, values = args[3], args[4]
        if not is_known(indices):  # every row at most once
            rows = torch.arange(indices.numel()).view_as(indices)
            args = (*args[:3], rows.remainder(torch.tensor(args[2][:args[0]])[:, None]), values)
        return func(*args, **kwargs)
    if func is torch.ops.aten.add_.Tensor and not is_sparse(args[0]):
        return args[0]
    if func not in _FOLLOWED:
        raise CaptureError(f"{func} of a sparse gradient cannot be followed without its values")
    out = func(*args, **kwargs)
    return MAKE_SPARSE(
        out.sparse_dim(), out.dense_dim(), list(out.size()), out._indices(),
        without_values(out._values()), dtype=out.dtype, layout=out.layout, device=out.device,
        is_coalesced=out.is_coalesced())
