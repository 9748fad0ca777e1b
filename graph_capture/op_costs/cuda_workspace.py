"""What kernels of CUDA allocate for themselves, where there is no such device to measure it on.

The model of the world: the sizes that torch's own code asks its allocator for
(`transformers/cuda/flash_attn/flash_api.cpp`, `transformers/cuda/attention_backward.cu`,
`cuda/EmbeddingBackwardKernel.cu`), which follow from the shapes.  cuDNN does not say what its
attention takes: its backward counts as that of flash attention, which sums the same gradient.

Blind spots: flash attention's split of long keys over idle units, which happens for few heads and
short queries; deterministic algorithms, which sum in as many copies as there are blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_ROWS_PER_THREAD = 10
_FEW_INDICES = 3072


def cuda_workspace_bytes(name: str, args: Sequence[Any]) -> int | None:
    """Of the op of this name (`_scaled_dot_product_flash_attention_backward`), called with `args`;
    `None`: its code was not looked at."""
    known = _KNOWN.get(name)
    return None if known is None else known(args)


def _none(args: Sequence[Any]) -> int:
    return 0


def _flash_backward(args: Sequence[Any]) -> int:
    """The gradient of the queries and a sum for each, in float32; with grouped heads, gradients of
    keys and values for each head of the queries."""
    _, query, key = args[:3]
    batch, heads, queries, size = query.shape
    rows = batch * heads * _up(queries, 128)
    padded = _up(size, 32 if size <= 128 else 64) if size <= 192 else 256
    grouped = 0 if key.shape[1] == heads else (
        2 * batch * heads * key.shape[2] * size * key.dtype.itemsize)
    return rows * 4 * (padded + 1) + grouped


def _efficient(args: Sequence[Any]) -> int:
    """An accumulator of the result, where a head does not fit in registers."""
    query, value = args[0], args[2]
    is_half = query.dtype.itemsize == 2
    return _rows(query) * value.shape[-1] * 4 if is_half and value.shape[-1] > 128 else 0


def _efficient_backward(args: Sequence[Any]) -> int:
    """A sum for each query; for half precision an accumulator of the queries' gradient, and of the
    keys' and values' where a head does not fit in registers; otherwise the product of gradient and
    result, which the sums are made of."""
    _, query, key, value = args[:4]
    batch, heads, queries, size = query.shape
    sums = _rows(query) * 4
    if query.dtype.itemsize != 2:
        return 2 * sums + _rows(query) * value.shape[-1] * 4
    found = sums + batch * heads * _up(queries, 128) * _up(size, 64) * 4
    if max(size, value.shape[-1]) > 128:
        found += batch * heads * _up(key.shape[2], 128) * (
            _up(size, 64) + _up(value.shape[-1], 64)) * 4
    return found


def _embedding_backward(args: Sequence[Any]) -> int:
    """Indices in order and where each came from, with what sorting takes; partial sums of rows."""
    gradient, indices, rows = args[:3]
    count = indices.numel()
    if count <= _FEW_INDICES:
        return 0
    accumulated = max(4, gradient.dtype.itemsize)
    partial = count // _ROWS_PER_THREAD + min(count, rows)
    return partial * _up(gradient.shape[-1], 32) * accumulated + 6 * count * 8


def _rows(query: torch.Tensor) -> int:
    batch, heads, queries = query.shape[:3]
    return int(batch * heads * queries)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_KNOWN: dict[str, Callable[[Sequence[Any]], int]] = {
    "_scaled_dot_product_flash_attention": _none,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _none,
    "_scaled_dot_product_cudnn_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("native_dropout", "native_dropout_backward", "native_layer_norm",
                     "_fused_rms_norm", "_to_copy", "cat", "constant_pad_nd", "gelu", "silu"),
                    _none)}
