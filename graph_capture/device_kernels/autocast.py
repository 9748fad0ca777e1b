"""The casts of `torch.autocast("cuda")` where those of the CPU differ.

The model of the world: autocast changes the arguments of an op by one of four policies, then runs
the op without autocast.  The lists are those of CUDA in torch's `ATen/autocast_mode.h`.  Ops that
both autocasts handle (matrix products and convolutions, and losses) keep the kernel of the CPU's;
those that only the CPU's handles (`cat`, `cross_entropy_loss`, `fft`) are left as they are.

Blind spot: `torch.autocast("cuda")` in the model's own code, which torch disables without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from planner._graph_capture.torch_compat import OpOverload, pytree, schema_of
from planner._graph_capture.torch_compat.dispatch import (
    Place,
    as_composed,
    beneath_autocast,
    has_kernel,
    names_at_one_key,
)


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
    of_cpu_only = names_at_one_key("AutocastCPU", but_not="AutocastCUDA")
    float32 = FLOAT32 | ({"rms_norm"} if _version() >= (2, 12) else set())
    for names, kernel in ((float32, _float32), (FLOAT32_RESULT, _float32_result),
                          (LOWER, _lower), (WIDEST, _widest), (of_cpu_only, _unchanged)):
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


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
