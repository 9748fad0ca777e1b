"""Corrects fake kernels of torch that are incomplete, when this module is imported.

A fake kernel computes the shapes of an op's results.  Torch's own refuses the grouped matrix
product in all dtypes but bfloat16, gives the fused LSTM of CPUs a reserve of no bytes and its two
biases one gradient, takes no symbolic sizes for the gradient of an interpolation, and lets batch
normalization on CPUs keep the strides of its input and compute in its dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table, meta_table
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict

from planner._graph_capture.torch_compat.compilation import schema_of
from planner._graph_capture.torch_compat.memory import no_active_modes

_aten = torch.ops.aten


def _grouped_product(mode: Any, func: Any, mat_a: torch.Tensor, mat_b: torch.Tensor,
                     offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
                     out_dtype: torch.dtype | None = None) -> Any:
    if mat_a.dtype is torch.bfloat16 or mat_a.dtype is not mat_b.dtype or bias is not None:
        return NotImplemented  # torch supports it, or refuses
    with mode:
        return _create_grouped_mm_output_tensor(mat_a, mat_b, offs, out_dtype)


def _fused_lstm(mode: Any, func: Any, *args: Any) -> Any:
    x, *weights = args[:7]
    shapes = tuple((tuple(map(int, t.shape)), t.dtype) for t in weights)
    with mode:
        output, hidden, cell = (like.new_empty(shape) for like, shape in (
            (x, (*x.shape[:-1], args[10])), (weights[4], weights[4].shape),
            (weights[5], weights[5].shape)))
        size = 0
        if torch.is_grad_enabled():
            size = _reserve_bytes(x.shape[0], tuple(map(int, x.shape[1:])), x.dtype, shapes, *(
                tuple(value) if isinstance(value, list) else value for value in args[7:]))
        return output, hidden, cell, torch.empty(size, dtype=torch.uint8, device=x.device)


def _gradients_of_fused_lstm(mode: Any, func: Any, *args: Any) -> Any:
    with mode:
        return tuple(each.new_empty(each.shape, dtype=torch.float32) for each in args[:7])


_FEW_STEPS = 5
_MEASURED_BYTES = 4 << 20


def _reserve_bytes(steps: Any, *rest: Any) -> Any:
    """Bytes that the library keeps for the backward of `steps` time steps, a size with symbols for
    such a number.

    Only the library knows them, so it is run for some steps, and each further one is assumed to
    need as much.  It rounds to pages of memory, so the sum is slightly off; the more so, the fewer
    steps are run.
    """
    if steps <= _FEW_STEPS:
        return _measured_reserve_bytes(int(steps), *rest)
    one, few = (_measured_reserve_bytes(count, *rest) for count in (1, _FEW_STEPS))
    of_step = max(1, (few - one) // (_FEW_STEPS - 1))
    some = max(_FEW_STEPS, _MEASURED_BYTES // of_step)
    if isinstance(steps, int) and steps <= some:
        return _measured_reserve_bytes(steps, *rest)
    found = _measured_reserve_bytes(some, *rest)
    return one + (steps - 1) * (found - one) // (some - 1)


@functools.lru_cache(maxsize=1024)
def _measured_reserve_bytes(
        steps: int, step: tuple[int, ...], dtype: torch.dtype,
        shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...], *settings: Any) -> int:
    with no_active_modes(), torch.enable_grad():
        weights = [torch.zeros(shape, dtype=kind) for shape, kind in shapes]
        *_, reserve = torch.ops.aten.mkldnn_rnn_layer.default(
            torch.zeros(steps, *step, dtype=dtype), *weights, *settings)
    return int(reserve.numel())


def _gradient_of_resize(mode: Any, func: Any, gradient: torch.Tensor, output_size: Sequence[int],
                        input_size: Sequence[int], *_: Any) -> Any:
    if all(isinstance(size, int) for size in (*gradient.shape, *output_size, *input_size)):
        return NotImplemented  # torch supports it
    has_format = func is not _aten.upsample_bicubic2d_backward.default
    with mode:
        return gradient.new_empty(input_size).to(memory_format=(
            suggest_memory_format(gradient) if has_format else torch.contiguous_format))


def _batch_norm(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    given = {argument.name: value for argument, value
             in zip(schema_of(func).arguments, args, strict=False)} | kwargs
    x, statistics = given["input"], [given.get(f"running_{name}") for name in ("mean", "var")]
    if x.device.type != "cpu":
        return _by_decomposition(mode, func, *args, **kwargs)
    with mode:
        output = torch.empty_like(x, memory_format=suggest_memory_format(x))
        means, deviations = (
            x.new_empty(x.shape[1] if given["training"] else 0,
                        dtype=_dtype_of_statistics(x, given["weight"], given["bias"], *statistics))
            for _ in range(2))
        updated = [torch.empty_like(each) for each in statistics if each is not None]
    return output, means, deviations, *updated[:len(schema_of(func).returns) - 3]


def _gradients_of_batch_norm(mode: Any, func: Any, gradient: torch.Tensor, x: torch.Tensor,
                             weight: torch.Tensor | None, *rest: Any) -> Any:
    *statistics, _, _, is_wanted = rest
    if x.device.type != "cpu":
        return _by_decomposition(mode, func, gradient, x, weight, *rest)
    dtype = _dtype_of_statistics(x, weight, *statistics)
    with mode:
        found = (torch.empty_like(x, memory_format=suggest_memory_format(x)),
                 x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype))
    return tuple(each if wanted else None for each, wanted in zip(found, is_wanted, strict=True))


def _by_decomposition(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return decomposition_table[func](*args, **kwargs)


def _dtype_of_statistics(x: torch.Tensor, *others: torch.Tensor | None) -> torch.dtype:
    is_mixed = any(each is not None and each.dtype is torch.float32 for each in others)
    return torch.float32 if is_mixed else x.dtype


for _op, _kernel in (
        (_aten.native_batch_norm.default, _batch_norm),
        (_aten._native_batch_norm_legit.default, _batch_norm),
        (_aten._native_batch_norm_legit.no_stats, _batch_norm),
        (_aten._native_batch_norm_legit_functional.default, _batch_norm),
        (_aten.native_batch_norm_backward.default, _gradients_of_batch_norm)):
    op_implementations_dict.setdefault(_op, _kernel)
    meta_table.setdefault(_op, decomposition_table[_op])  # else torch does not look for the kernel
for _backward in (_aten.upsample_linear1d_backward, _aten.upsample_bilinear2d_backward,
                  _aten.upsample_trilinear3d_backward, _aten.upsample_bicubic2d_backward):
    op_implementations_dict.setdefault(_backward.default, _gradient_of_resize)
op_implementations_dict.setdefault(_aten._grouped_mm.default, _grouped_product)
op_implementations_dict.setdefault(_aten.mkldnn_rnn_layer.default, _fused_lstm)
op_implementations_dict.setdefault(_aten.mkldnn_rnn_layer_backward.default,
                                   _gradients_of_fused_lstm)
