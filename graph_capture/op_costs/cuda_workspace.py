"""Workspace of CUDA's kernels, where there is no such device to measure it on.

The model of the world: the sizes that torch's own code requests from its allocator
(`transformers/cuda/flash_attn/flash_api.cpp`, `transformers/cuda/attention_backward.cu`,
`cuda/EmbeddingBackwardKernel.cu`, `cuda/Reduce.cuh`, `cuda/SoftMax.cu`, `cuda/CUDABlas.cpp`), which
follow from shapes, strides and a few figures of the device.  The workspace of cuDNN's attention is
undocumented: its backward counts as that of flash attention, which sums the same gradient.

torch keeps the cuBLAS workspace from the first matrix product of each thread on; torch 2.15
allocates it for each product, unless `TORCH_CUBLAS_WORKSPACE_CACHE=1` is set.

Blind spots: flash attention's split of long keys over idle units, which happens for few heads and
short queries; deterministic algorithms, which sum in as many copies as there are blocks; sums over
other dimensions than leading or trailing ones; torch 2.11 keeps another MiB for each thread that
multiplies and adds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner._graph_capture.device_kernels.attention import INSTALLED
from planner._graph_capture.memory.caching_allocator import rounded_up
from planner._graph_capture.op_costs.devices import Gpu

_ROWS_PER_THREAD = 10
_FEW_INDICES = 3072
_LT_BYTES = 2 ** 20
"""Workspace that torch gives cuBLASLt, which multiplies and adds."""


def cuda_workspace_bytes(name: str, args: Sequence[Any], gpu: Gpu) -> int | None:
    """Workspace of the op of this name (`_scaled_dot_product_flash_attention_backward`), called
    with `args` on `gpu`; `None`: unknown."""
    if name == "sum":
        return _sum(args, gpu)
    known = _KNOWN.get(name)
    return None if known is None else known(args)


def product_workspace_bytes(name: str, gpu: Gpu) -> int:
    """Workspace that torch allocates for one matrix product by the op of this name, without the
    workspace that it keeps."""
    if _holds_workspace():
        return 0
    return _LT_BYTES if name == "addmm" else cublas_workspace_bytes(gpu)


def held_workspace_bytes(gpu: Gpu | None) -> int:
    """Workspace that torch keeps for cuBLAS, for each thread that has multiplied matrices; `None`:
    a CPU."""
    return 0 if gpu is None or not _holds_workspace() else cublas_workspace_bytes(gpu)


def cublas_workspace_bytes(gpu: Gpu, version: tuple[int, ...] = INSTALLED) -> int:
    """Size of the cuBLAS workspace on each handle and stream."""
    given = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if given:
        return sum(int(size) * 1024 * int(count) for size, count in given)
    major = gpu.compute_capability[0]
    return 32 << 20 if major == 9 or (major in (10, 11, 12) and version >= (2, 12)) else 8_519_680


def _holds_workspace() -> bool:
    return INSTALLED < (2, 15) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def _none(args: Sequence[Any]) -> int:
    return 0


def _flash_backward(args: Sequence[Any]) -> int:
    """The gradient of the queries and a sum for each, in float32; with grouped heads, gradients of
    keys and values for each head of the queries."""
    gradient, query, key = args[:3]
    batch, heads, queries, size = query.shape
    copies = sum(map(_copy_of_heads, (gradient, *args[4:5])))
    rows = batch * heads * rounded_up(queries, 128)
    padded = rounded_up(size, 32 if size <= 128 else 64) if size <= 192 else 256
    grouped = 0 if key.shape[1] == heads else (
        2 * batch * heads * key.shape[2] * size * key.dtype.itemsize)
    return rows * 4 * (padded + 1) + grouped + copies


def _efficient(args: Sequence[Any]) -> int:
    """An accumulator of the result, if a head does not fit in registers."""
    query, value = args[0], args[2]
    is_half = query.dtype.itemsize == 2
    return _rows(query) * value.shape[-1] * 4 if is_half and value.shape[-1] > 128 else 0


def _efficient_backward(args: Sequence[Any]) -> int:
    """A sum for each query; for half precision an accumulator of the queries' gradient, and of the
    keys' and values' if a head does not fit in registers; otherwise the product of gradient and
    result from which the sums are made."""
    gradient, query, key, value = args[:4]
    batch, heads, queries, size = query.shape
    sums, copy = _rows(query) * 4, _copy_of_heads(gradient)
    if query.dtype.itemsize != 2:
        return 2 * sums + _rows(query) * value.shape[-1] * 4 + copy
    found = copy + sums + batch * heads * rounded_up(queries, 128) * rounded_up(size, 64) * 4
    if max(size, value.shape[-1]) > 128:
        found += batch * heads * rounded_up(key.shape[2], 128) * (
            rounded_up(size, 64) + rounded_up(value.shape[-1], 64)) * 4
    return found


def _embedding_backward(args: Sequence[Any]) -> int:
    """Sorted indices and their origin, with the memory of the sort; partial sums of rows."""
    gradient, indices, rows = args[:3]
    count = indices.numel()
    if count <= _FEW_INDICES:
        return 0
    accumulated = max(4, gradient.dtype.itemsize)
    partial = count // _ROWS_PER_THREAD + min(count, rows)
    return partial * rounded_up(gradient.shape[-1], 32) * accumulated + 6 * count * 8


def _copy_of_heads(tensor: torch.Tensor) -> int:
    """Bytes of a copy with the heads of a token side by side; 0 if they already are."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.numel() * tensor.dtype.itemsize


def _softmax_backward(args: Sequence[Any]) -> int:
    """The product of gradient and result."""
    return int(args[0].numel() * args[0].dtype.itemsize)


def _sum(args: Sequence[Any], gpu: Gpu) -> int:
    """Partial sums of leading dimensions (the gradient of a bias), each by several blocks: the
    columns of a block for each block and output, and a counter for each block."""
    x = args[0]
    dims = args[1] if len(args) > 1 and args[1] else range(x.dim())
    reduced = {dim % max(x.dim(), 1) for dim in ([dims] if isinstance(dims, int) else dims)}
    if reduced != set(range(len(reduced))) or len(reduced) == x.dim() or not x.is_contiguous():
        return 0
    inputs = math.prod(x.shape[:len(reduced)])
    outputs = x.numel() // inputs if inputs else 0
    if outputs < 2:
        return 0
    vector = math.gcd(4, outputs)
    columns, most = outputs // vector, 512 // vector
    wide, high = (min(_power_of_two(size), most) for size in (columns, inputs))
    width = min(wide, 32)
    height = min(high, most // width)
    width = min(wide, most // height)
    values = inputs
    if values < min(16 * height, 256):
        return 0
    values = -(-values // height)
    grid = -(-columns // width)
    headroom = gpu.multiprocessors * (gpu.threads_of_multiprocessor // (width * height))
    if values < 256 or grid > headroom:
        return 0
    blocks = max(min(-(-headroom // grid), -(-values // 16)), -(-values // 256))
    accumulated = max(4, x.dtype.itemsize)
    return 0 if blocks < 2 else (
        accumulated * outputs * blocks * width * vector + 4 * grid)


def _power_of_two(size: int) -> int:
    """The largest power of two that is no larger than `size`."""
    return 1 << (size.bit_length() - 1)


def _rows(query: torch.Tensor) -> int:
    batch, heads, queries = query.shape[:3]
    return int(batch * heads * queries)


_KNOWN: dict[str, Callable[[Sequence[Any]], int]] = {
    "_scaled_dot_product_flash_attention": _none,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _none,
    "_scaled_dot_product_cudnn_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "embedding_dense_backward": _embedding_backward,
    "_softmax_backward_data": _softmax_backward,
    **dict.fromkeys(("native_dropout", "native_dropout_backward", "native_layer_norm",
                     "_fused_rms_norm", "_to_copy", "cat", "constant_pad_nd", "gelu", "silu"),
                    _none)}
