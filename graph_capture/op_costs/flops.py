"""Work of single ops: floating-point operations and bytes read and written.

The model of the world: a multiply-add is two FLOPs, a causal mask saves none, moving data costs
bytes and no FLOPs, and any other op costs a small number of FLOPs per element that it reads or
writes.  The formulas of `torch.utils.flop_counter` are used where there are any, except for

- `convolution_backward`: it forgets the groups in the gradient of the weight;
- `cudnn_convolution`, `_slow_conv2d_forward`: it reads their arguments as those of `convolution`;
- attention: some releases of it refuse fewer heads of keys than of queries.

It has none for the CPU's attention kernels, recurrent layers, products with a vector, or anything
else.  To count an op otherwise, change its row in `_FORMULAS`, which comes first, or in
`_PER_ELEMENT`.

Blind spots: algorithms with fewer operations (Winograd, sparsity); ops of others than torch count
as pointwise, except bitsandbytes' products and those with a formula of their own
(`torch.utils.flop_counter.register_flop_formula`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2, prod
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from planner._graph_capture.joint_graph.joint import tensors_of
from planner._graph_capture.torch_compat import OpOverload, schema_of, storage_key


def op_flops(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of `target(*args, **kwargs)`, whose result is `out`; tensors may be fake."""
    name = op_name(target)
    inputs, outputs = tensors_of((args, kwargs)), tensors_of(out)
    if not schema_of(target).is_mutable and not makes_storage(inputs, outputs):
        return 0  # a view
    formula = _FORMULAS.get(name)
    if formula is not None:
        return int(formula(OpCall(args, kwargs, inputs, outputs)))
    registered = flop_registry.get(target.overloadpacket)
    if registered is not None:
        # An overload with the dtype of its result, a parameter that the formulas lack.
        known = [arg for arg in args if not isinstance(arg, torch.dtype)]
        return int(registered(*known, **kwargs, out_val=out))
    if name.removesuffix("_") in _MOVERS or name.startswith("new_"):
        return 0
    elements = max((tensor.numel() for tensor in (*inputs, *outputs)), default=0)
    if name in _SORTS:
        return int(elements * max(1.0, log2(max(1, elements))))
    if name.startswith("_foreach_"):
        elements = max(sum(tensor.numel() for tensor in tensors) for tensors in (inputs, outputs))
    return int(_PER_ELEMENT.get(name.removesuffix("_"), 1) * elements)


def bytes_moved(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                out: Any) -> int:
    """Bytes that the op reads and writes: of each tensor once, however often it is expanded.

    An op that picks rows reads as much of its operands as it writes, not whole tables.
    """
    inputs, outputs = tensors_of((args, kwargs)), tensors_of(out)
    if not schema_of(target).is_mutable and not makes_storage(inputs, outputs):
        return 0
    written = sum(_touched_bytes(tensor) for tensor in outputs)
    read = [_touched_bytes(tensor) for tensor in {id(tensor): tensor for tensor in inputs}.values()]
    if op_name(target) in _PICKERS:
        read = [min(size, written) for size in read]
    return written + sum(read)


class OpCall(NamedTuple):
    """One run of an op."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


Formula = Callable[[OpCall], float]


def _matrix_product(call: OpCall) -> int:
    """FLOPs of `[b] m k @ [b] k n`: the two matrices are the last operands of every such op."""
    left, right = call.inputs[-2:]
    columns = right.shape[-1] if right.dim() > 1 else 1
    return 2 * left.numel() * columns


def _convolution_once(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor,
                      transposed: bool = False) -> int:
    """FLOPs with each element of the weight used once per position: of the output, or, transposed,
    of the input."""
    spatial = weight.dim() - 2
    positions = (x if transposed else out).shape[-spatial:]
    batch = x.shape[0] if x.dim() == weight.dim() else 1
    return 2 * batch * prod(positions) * weight.numel()


def _convolution_backward(call: OpCall) -> int:
    grad_out, x, weight = call.args[:3]
    mask = call.kwargs.get("output_mask",
                           call.args[10] if len(call.args) > 10 else (True, True, True))
    wanted = bool(mask[0]) + bool(mask[1])
    return wanted * _convolution_once(x, weight, grad_out, bool(call.args[7]))


def _attention(call: OpCall) -> int:
    """FLOPs of the scores and of their product with the values."""
    query, key, value = call.args[:3]
    return 2 * _scores(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(call: OpCall) -> int:
    """FLOPs of the scores again, then of gradients: of scores and values, of query and key."""
    _, query, key, value = call.args[:4]
    return 2 * _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    """Elements of `query @ keyᵀ` over all batches and query heads."""
    return prod(query.shape[:-1]) * key.shape[-2]


def _recurrent(call: OpCall) -> int:
    """FLOPs with every weight matrix used once for every position of the sequence."""
    weights = [t for t in call.inputs if t.dim() == 2 and t.dtype.is_floating_point]
    return 2 * sum(w.numel() for w in weights) * prod(call.inputs[0].shape[:-1])


_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("addbmm", "mv", "addmv", "dot", "vdot", "_int_mm", "matmul"),
                    _matrix_product),
    **dict.fromkeys(("linear", "mkldnn_linear", "_mkl_linear", "int8_linear_matmul",
                     "int8_scaled_mm"),
                    lambda call: 2 * call.inputs[0].numel() * call.inputs[1].shape[0]),
    **dict.fromkeys(("gemm_4bit", "gemv_4bit"),  # the second operand is packed
                    lambda call: 2 * call.inputs[0].numel() * call.args[2][0]),
    "int8_mixed_scaled_mm": lambda call: 2 * call.inputs[0].numel() * call.args[2].shape[0],
    **dict.fromkeys(("outer", "ger"), lambda call: 2 * call.outputs[0].numel()),
    **dict.fromkeys(("cudnn_convolution", "miopen_convolution", "mkldnn_convolution",
                     "_slow_conv2d_forward", "slow_conv3d_forward", "_conv_depthwise2d",
                     "conv_depthwise3d", "conv1d", "conv2d", "conv3d"),
                    lambda call: _convolution_once(call.args[0], call.args[1], call.outputs[0])),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"),
                    _convolution_backward),
    **dict.fromkeys(("scaled_dot_product_attention", "_scaled_dot_product_attention_math",
                     "_scaled_dot_product_flash_attention",
                     "_scaled_dot_product_flash_attention_for_cpu",
                     "_scaled_dot_product_efficient_attention",
                     "_scaled_dot_product_cudnn_attention",
                     "_scaled_dot_product_fused_attention_overrideable"), _attention),
    **dict.fromkeys(("_scaled_dot_product_flash_attention_backward",
                     "_scaled_dot_product_flash_attention_for_cpu_backward",
                     "_scaled_dot_product_efficient_attention_backward",
                     "_scaled_dot_product_cudnn_attention_backward",
                     "_scaled_dot_product_fused_attention_overrideable_backward"),
                    _attention_backward),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _recurrent),
    **dict.fromkeys(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward"),
                    lambda call: 2 * _recurrent(call)),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d",
                     "avg_pool3d", "max_pool2d", "max_pool1d", "avg_pool1d"),
                    # Each output looks at its whole window.
                    lambda call: prod(call.args[1]) * call.outputs[0].numel()),
    **dict.fromkeys(("avg_pool2d_backward", "avg_pool3d_backward"),
                    lambda call: prod(call.args[2]) * call.inputs[0].numel()),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
                     "embedding_dense_backward", "nll_loss_backward", "nll_loss2d_backward"),
                    # Each summand, not the elements of the table that receives it.
                    lambda call: call.inputs[0].numel()),
    **dict.fromkeys(("scatter_add", "index_add", "index_put", "_index_put_impl", "index_put_",
                     "_unsafe_index_put"), lambda call: call.inputs[-1].numel()),
    # One element of each row is picked and averaged.
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"),
                    lambda call: 2 * call.args[1].numel()),
}
"""FLOPs of the ops that are more than a constant per element."""

_MOVERS = frozenset({
    "clone", "copy", "_to_copy", "contiguous", "empty", "empty_like", "empty_strided", "full",
    "full_like", "zeros", "zeros_like", "ones", "ones_like", "fill", "zero", "arange", "linspace",
    "scalar_tensor", "lift_fresh", "lift_fresh_copy", "cat", "stack", "index", "_unsafe_index",
    "index_select", "gather", "embedding", "slice_backward", "select_backward", "slice_scatter",
    "select_scatter", "diagonal_backward", "unfold_backward", "as_strided_scatter", "roll", "flip",
    "repeat", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad2d",
    "tril", "triu", "_unsafe_view", "view", "detach", "scatter", "masked_fill", "masked_scatter",
    "where", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "_local_scalar_dense",
    "set", "resize",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "im2col",
    "split_with_sizes_copy", "_foreach_copy", "_foreach_zero", "tril_indices", "triu_indices"})
"""Ops that move or make data, by name without a trailing underscore."""

_PICKERS = frozenset({"embedding", "index", "_unsafe_index", "index_select", "gather"})

_SORTS = frozenset({"sort", "topk", "argsort", "kthvalue", "unique_dim", "_unique2", "msort"})

_PER_ELEMENT: dict[str, int] = {
    # Maximum, difference, exponential, sum, quotient.
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), 5),
    "logsumexp": 4,
    "_softmax_backward_data": 4,  # product, sum, product, difference
    "_log_softmax_backward_data": 4,  # sum, exponential, product, difference
    # Mean 1, variance 3, normalization 2, affine map 2.
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_batch_norm",
                     "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
                     "_batch_norm_with_update", "_batch_norm_with_update_functional",
                     "cudnn_batch_norm", "miopen_batch_norm"), 8),
    # Two reductions per row, two per column, the combination.
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward"), 14),
    **dict.fromkeys(("native_batch_norm_backward", "cudnn_batch_norm_backward",
                     "miopen_batch_norm_backward", "batch_norm_backward"), 11),
    "_fused_rms_norm": 5, "_fused_rms_norm_backward": 10,
    **dict.fromkeys(("var", "std"), 3), **dict.fromkeys(("var_mean", "std_mean"), 4),
    **dict.fromkeys(("linalg_vector_norm", "norm"), 2),
    # A transcendental function counts as several products.
    **dict.fromkeys(("gelu", "erf", "mish", "silu_backward"), 8), "gelu_backward": 14,
    **dict.fromkeys(("silu", "sigmoid", "tanh", "exp", "log", "pow"), 4), "softplus": 5,
    **dict.fromkeys(("sigmoid_backward", "tanh_backward", "addcmul", "addcdiv", "lerp",
                     "_cdist_forward"), 3),
    "native_dropout": 3,  # a random number, a comparison, a product
    "bernoulli": 2,
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bilinear2d_backward"), 8),
    **dict.fromkeys(("upsample_bicubic2d", "upsample_bicubic2d_backward"), 40),
    "grid_sampler_2d": 12, "grid_sampler_2d_backward": 24,
}
"""FLOPs per element, where they are not 1; by name without a trailing underscore."""


def op_name(target: OpOverload) -> str:
    """An op's name without namespace and overload."""
    return schema_of(target).name.partition("::")[2]


def makes_storage(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """True if the op makes a storage; one that only makes views runs no kernel."""
    of_inputs = {storage_key(tensor) for tensor in inputs}
    return any(storage_key(tensor) not in of_inputs for tensor in outputs)


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension is read once."""
    sizes = [int(size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
             if stride != 0 or size == 0] if tensor.layout is torch.strided else tensor.shape
    return prod(sizes) * tensor.dtype.itemsize
