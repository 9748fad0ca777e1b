"""The kernels of an absent GPU, in place of those that torch would choose on the CPU.

The model of the world: an op that torch runs directly (a matrix product, a convolution) is the same
op on every device.  Some other ops are composed differently by device: attention, batch and root
mean square normalization, dropout, a softmax that casts, recurrent layers, and the casts of
autocast.  They are replaced by their composition on an NVIDIA GPU, forward and backward; tensors
stay on the tracing device.

Autocast changes the arguments of an op by one of four policies, then runs the op without autocast;
the lists of ops below are those of CUDA in torch's `ATen/autocast_mode.h`.  Ops that both autocasts
handle (matrix products and convolutions, and losses) keep the kernel of the CPU's; those that only
the CPU's handles (`cat`, `cross_entropy_loss`, `fft`) are left as they are.

Blind spots: `torch.autocast("cuda")` in the model's own code, which torch disables without a GPU;
`ctc_loss` and `grid_sampler` by cuDNN; recurrent layers where autograd runs op by op
(cuDNN's kernel has a reserve of unknown size, so they count as the ops that torch.compile traces);
cuDNN's reserve for batch normalization, assumed to be zero as for contiguous operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from planner._graph_capture.device_kernels.attention import (
    INSTALLED,
    AttentionCall,
    AttentionKernel,
    choose_attention,
    with_batch,
)
from planner._graph_capture.torch_compat import OpOverload, pytree, schema_of
from planner._graph_capture.torch_compat.dispatch import (
    Place,
    as_composed,
    beneath_autocast,
    decomposition_of,
    has_kernel,
    kernels_replaced,
    ops_of_cpu_autocast_only,
)

aten = torch.ops.aten

_MOST_OF_CUDNN = 880_801


class DeviceKernels:
    """Chooses and replaces the kernels for a GPU of one compute capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        """`capability`: as `torch.cuda.get_device_capability` gives it."""
        self.capability = capability
        self.rules: dict[str, dict[str, None]] = {}
        """The rules by which each kernel was chosen, by its name; cleared by the reader."""
        composed: dict[Any, Callable[..., Any]] = {
            aten.scaled_dot_product_attention.default: self._attention,
            aten.batch_norm.default: self._batch_norm,
            aten.dropout.default: self._dropout,
            aten.softmax.int: _softmax(aten.softmax.int, aten._softmax.default),
            aten.log_softmax.int: _softmax(aten.log_softmax.int, aten._log_softmax.default)}
        for layer in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu):
            composed |= {op: found for op in (layer.input, layer.data)
                         if (found := decomposition_of(op)) is not None}
        self._kernels: dict[Place, Callable[..., Any]] = {
            **{Place(op, "AutogradCPU"): kernel for op, kernel in composed.items()},
            **dict(autocast_kernels()),
            Place(aten._fused_rms_norm.default, "CPU"): as_composed(aten._fused_rms_norm.default)}

    def active(self) -> AbstractContextManager[None]:
        """Inside, ops of this thread run these kernels."""
        return kernels_replaced(self._kernels)

    def notes(self) -> tuple[str, ...]:
        """Describe the choices so far, and their reasons."""
        major, minor = self.capability
        return (f"there is no such GPU here: kernels are those that torch would choose on compute "
                f"capability {major}.{minor}",
                *(f"{kernel}: {' | '.join(rules)}" for kernel, rules in self.rules.items()))

    def _note(self, kernel: str, rule: str) -> None:
        self.rules.setdefault(kernel, {})[rule] = None

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                   attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
                   is_causal: bool = False, *, scale: float | None = None,
                   enable_gqa: bool = False) -> torch.Tensor:
        call = with_batch(
            AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa))
        if call.query is not query:
            return self._attention(call.query, call.key, call.value, call.mask, dropout_p,
                                   is_causal, scale=scale, enable_gqa=enable_gqa).squeeze(0)
        choice = choose_attention(call, self.capability)
        self._note(f"attention by {choice.kernel}", choice.rule)
        if choice.kernel is AttentionKernel.FLASH:
            size = query.shape[-1]
            scale = 1.0 / math.sqrt(size) if scale is None else scale
            padded = [torch.nn.functional.pad(t, (0, -size % 8)) if size % 8 else t
                      for t in (query, key, value)]
            out = aten._scaled_dot_product_flash_attention.default(
                *padded, dropout_p, is_causal, False, scale=scale)[0]
            return aten.slice.Tensor(out, -1, 0, size) if size % 8 else out
        is_cudnn = choice.kernel is AttentionKernel.CUDNN
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool:
            lowest = aten.scalar_tensor.default(-65504.0 if is_cudnn else -math.inf,
                                                dtype=query.dtype, device=mask.device)
            mask = aten.where.ScalarSelf(mask, 0.0, lowest)
        if choice.kernel is AttentionKernel.MATH:
            return aten._scaled_dot_product_attention_math.default(
                query, key, value, mask, dropout_p, is_causal, None, scale=scale,
                enable_gqa=enable_gqa)[0]
        if is_cudnn:
            return aten._scaled_dot_product_cudnn_attention.default(
                query, key, value, mask, call.needs_gradient, dropout_p, is_causal, False,
                scale=scale)[0]
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, mask, call.needs_gradient, dropout_p, is_causal, scale=scale)[0]

    def _batch_norm(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
                    mean: torch.Tensor | None, variance: torch.Tensor | None, training: bool,
                    momentum: float, eps: float, cudnn_enabled: bool) -> torch.Tensor:
        why = _why_not_cudnn(x, weight, bias, mean, variance, training)
        if x.numel() == 0:
            return as_composed(aten.batch_norm.default)(
                x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled)
        if why:
            self._note("batch norm by torch", f"not cuDNN: {why}")
            return aten.native_batch_norm.default(
                x, weight, bias, mean, variance, training, momentum, eps)[0]
        self._note("batch norm by cudnn", f"{str(x.dtype).removeprefix('torch.')}, with weight and "
                   "bias, 3 dimensions or more")
        last = (torch.channels_last if x.dim() == 4 else
                torch.channels_last_3d if x.dim() == 5 else torch.contiguous_format)
        kept = last if x.dim() > 3 and x.is_contiguous(memory_format=last) else (
            torch.contiguous_format)
        return aten.cudnn_batch_norm.default(
            x.contiguous(memory_format=kept), weight, bias, mean, variance, training, momentum,
            eps)[0]

    def _dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not (train and 0 < p < 1 and x.numel()):
            return as_composed(aten.dropout.default)(x, p, train)
        return aten.native_dropout.default(x, p, train)[0]


def _why_not_cudnn(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
                   mean: torch.Tensor | None, variance: torch.Tensor | None, training: bool) -> str:
    """The reason not to use cuDNN, as in `_select_batch_norm_backend` of torch's
    `Normalization.cpp`; empty: use it."""
    if not torch.backends.cudnn.enabled:
        return "switched off"
    if weight is None or bias is None:
        return "no weight or no bias"
    if torch.bfloat16 in (x.dtype, weight.dtype):
        return "it takes no bfloat16"
    if x.dtype is torch.float16 and weight.dtype is not torch.float32:
        return "float16 with a weight of another dtype than float32"
    if (mean is None) != (variance is None) or (mean is None and not training):
        return "no running statistics"
    if x.dim() < 3:
        return "fewer than 3 dimensions"
    if x.shape[0] > (_MOST_OF_CUDNN if training else 65535):
        return "too large a batch"
    return "2³¹ elements or more" if x.numel() >= (1 << 31) - 1 else ""


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask, padded so that each row begins on a multiple of 8 elements."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    size = mask.shape[-1]
    padded = torch.nn.functional.pad(mask, (0, 8 - size % 8))
    return aten.slice.Tensor(padded, -1, 0, size)


def _softmax(op: Any, fused: Any) -> Callable[..., torch.Tensor]:
    def kernel(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if x.dtype is torch.float16 and dtype is torch.float32:
            return fused(x, dim, True)
        return as_composed(op)(x, dim, dtype)

    return kernel


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa""")
"""Ops whose operands are cast to float32; from torch 2.12 on also `rms_norm`."""

FLOAT32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList""")
"""Ops that compute in float32 unless a dtype is given."""

LOWER = _names("""
    prelu addmv addr einsum mv chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell""")
"""Ops whose operands are cast to autocast's dtype, in addition to those of the CPU's autocast."""

WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add""")
"""Ops whose operands are cast to the widest dtype among them."""


def autocast_kernels() -> Iterator[tuple[Place, Callable[..., Any]]]:
    """Replacements of the ops in these lists while autocast is on, for ops that this torch has, and
    of those that only the CPU's autocast changes."""
    float32 = FLOAT32 | ({"rms_norm"} if INSTALLED >= (2, 12) else set())
    for names, kernel in ((float32, _float32), (FLOAT32_RESULT, _float32_result), (LOWER, _lower),
                          (WIDEST, _widest), (ops_of_cpu_autocast_only(), _unchanged)):
        for name in sorted(names):
            op = _op(name)
            if op is not None:
                yield Place(op, "AutocastCPU"), functools.partial(kernel, op)


def _unchanged(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    if has_kernel(op, "CompositeImplicitAutograd"):  # made of others, which autocast may change
        return as_composed(op)(*args, **kwargs)
    return _without_autocast(op, *args, **kwargs)


def _float32(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _cast((args, kwargs), torch.float32)
    return _without_autocast(op, *args, **kwargs)


def _lower(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype("cpu"))
    return _without_autocast(op, *args, **kwargs)


def _widest(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    dtypes = {leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if _is_cast(leaf)}
    if len(dtypes) > 1:
        args, kwargs = _cast((args, kwargs), torch.float32)
    return _without_autocast(op, *args, **kwargs)


def _float32_result(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    arguments = schema_of(op).arguments
    parameters = [argument.name for argument in arguments]
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    if _is_cast(args[0]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
        keyword_only = {argument.name for argument in arguments if argument.kwarg_only}
        count = parameters.index("dtype") if "dtype" not in keyword_only else len(args)
        args = tuple(given.pop(name) for name in parameters[:count] if name in given)
        kwargs = given
    return _without_autocast(op, *args, **kwargs)


def _without_autocast(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with beneath_autocast():
        return op(*args, **kwargs)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, tree)


def _is_cast(leaf: Any) -> bool:
    return (isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            and leaf.dtype is not torch.float64)


def _op(name: str) -> OpOverload | None:
    packet = getattr(torch.ops.aten, name.partition(".")[0], None)
    found = getattr(packet, name.partition(".")[2] or "default", None)
    return found if isinstance(found, OpOverload) else None

