"""The kernel of `scaled_dot_product_attention` that torch chooses on an NVIDIA GPU.

The model of the world: torch goes through its kernels in an order of priority and chooses the first
that is switched on and supports the operands.  The rules are those of torch's own
`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` and `sdp_utils_cpp.h`, for dense operands and
the CUDA builds of torch 2.11 and later: flash attention (in (8.0) to (12.1)), then memory efficient
attention, then the composite of products and a softmax.  On compute capability 9 and 10 cuDNN comes
first; the cuDNN of these builds is new enough.  The caller sets the switches and the order with
`torch.nn.attention.sdpa_kernel` and `torch.backends.cuda.enable_*_sdp`.
`benchmarks/attention_choice.py` compares these rules with torch 2.11, 2.12 and 2.15 without a GPU,
and they agree.

Blind spots: torch 2.13 and 2.14, of which no CUDA build was at hand (changes between 2.12 and 2.15
are dated by their pull requests, else to 2.15); nested tensors; FlashAttention 3 and 4, which are
registered by hand; another cuDNN than the build's own; builds of CUDA 12 on compute capabilities
9.x and 10.x other than 9.0, 10.0 and 10.3.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from planner._graph_capture.torch_compat.dispatch import attention_switches
from planner._graph_capture.training_graph import KernelChoice, Phase, TrainingOp

_HALF = (torch.float16, torch.bfloat16)
_MOST_BLOCKS = 65535
"""Limit of sequences or heads in a launch."""

Version = tuple[int, ...]
"""Version of torch: major and minor."""

INSTALLED: Version = tuple(
    int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


class AttentionKernel(StrEnum):
    """An implementation of attention in torch."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of `scaled_dot_product_attention`; tensors may be fake."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    grouped: bool
    """True if there may be fewer heads of keys than of queries (`enable_gqa`)."""

    @property
    def needs_gradient(self) -> bool:
        """True if autograd records the call, by the kernels' own test."""
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (self.query, self.key, self.value))

    @property
    def head_dim(self) -> int:
        """Head dimension of queries."""
        return self.query.shape[-1]


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A kernel and the rule that chose it."""

    kernel: AttentionKernel
    rule: str


def with_batch(call: AttentionCall, version: Version = INSTALLED) -> AttentionCall:
    """The call as kernels see it: from torch 2.15 on, operands of 3 dimensions get a batch
    dimension."""
    operands = (call.query, call.key, call.value)
    if version < (2, 15) or any(tensor.dim() != 3 for tensor in operands):
        return call
    mask = call.mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    query, key, value = (tensor.unsqueeze(0) for tensor in operands)
    return replace(call, query=query, key=key, value=value, mask=mask)


def choose_attention(call: AttentionCall, capability: tuple[int, int],
                     version: Version = INSTALLED) -> AttentionChoice:
    """The kernel that torch of a `version` runs for a call on a GPU of this compute capability.

    Raises `RuntimeError`, as torch does, if no kernel that is switched on supports the call.
    """
    call = with_batch(call, version)
    refused: list[str] = []
    enabled, order = attention_switches()
    prefers_cudnn = (capability[0] in (9, 10)
                     and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1")
    for kernel in map(AttentionKernel, order or (
            ("cudnn", "flash", "efficient", "math") if prefers_cudnn
            else ("flash", "efficient", "math", "cudnn"))):
        why = "switched off" if kernel not in enabled else next(
            _objections(kernel, call, capability, version), None)
        if why is None:
            dtype = str(call.query.dtype).removeprefix("torch.")
            rule = f"{dtype}, head dim {call.head_dim}, compute capability " \
                   f"{capability[0]}.{capability[1]}"
            return AttentionChoice(kernel, "; ".join([rule, *refused]))
        refused.append(f"not {kernel}: {why}")
    raise RuntimeError("no kernel of scaled_dot_product_attention takes this call on the device "
                       f"planned for: {'; '.join(refused)}")


def _objections(kernel: AttentionKernel, call: AttentionCall, capability: tuple[int, int],
                version: Version) -> Iterator[str]:
    """The reasons why a kernel does not support a call, the first one first."""
    if kernel is not AttentionKernel.MATH:
        yield from _objections_of_all(kernel, call, version)
        yield from _OBJECTIONS[kernel](call, capability, version)


def _objections_of_all(kernel: AttentionKernel, call: AttentionCall, version: Version
                       ) -> Iterator[str]:
    operands = (call.query, call.key, call.value)
    if any(tensor.dim() != 4 for tensor in operands):
        yield "operands are not of 4 dimensions"
        return
    if any(tensor.dtype is not call.query.dtype for tensor in operands):
        yield "operands of several dtypes"
    if len({tensor.shape[0] for tensor in operands}) > 1:
        yield "batches of several sizes"
    yield from _objections_to_heads(kernel, call, version)
    if not (call.query.shape[-2] and call.key.shape[-2]):
        yield "a sequence of length 0"
    strided = all(tensor.stride(-1) == 1 for tensor in operands) or (
        kernel is not AttentionKernel.EFFICIENT and call.head_dim == 1)
    if not strided or (call.mask is not None and call.mask.stride(-1) != 1):
        yield "an operand whose last dimension has another stride than 1"


def _objections_to_heads(kernel: AttentionKernel, call: AttentionCall, version: Version
                         ) -> Iterator[str]:
    queries, keys, values = (tensor.shape[-3] for tensor in (call.query, call.key, call.value))
    is_new = version >= (2, 15)
    takes_groups = kernel is not AttentionKernel.EFFICIENT or is_new
    if not (call.grouped and takes_groups):
        if not (queries == keys == values or (is_new and keys == values == 1)):
            yield "it takes no fewer heads of keys than of queries"
    elif queries % keys or queries % values or (
            keys != values and kernel is not AttentionKernel.CUDNN):
        yield "numbers of heads that do not divide"


def _flash(call: AttentionCall, capability: tuple[int, int], version: Version
           ) -> Iterator[str]:
    if call.mask is not None:
        yield "there is a mask"
    if len({tensor.shape[-1] for tensor in (call.query, call.key, call.value)}) > 1:
        yield "head dims differ"
    if call.head_dim > 256:
        yield "head dim over 256"
    if not (8, 0) <= capability <= (12, 1):
        yield "it needs compute capability 8.0 to 12.1"
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    if is_small and call.needs_gradient and call.head_dim > 192 and (
            call.dropout > 0 or call.head_dim <= 224):
        yield "no backward for this head dim here"
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        yield "causal with different lengths"
    if version >= (2, 15) and max(call.query.shape[:2]) > _MOST_BLOCKS:
        yield f"more than {_MOST_BLOCKS} sequences or heads"
    if call.query.dtype not in _HALF:
        yield "it takes float16 and bfloat16 only"


def _efficient(call: AttentionCall, capability: tuple[int, int], version: Version
               ) -> Iterator[str]:
    dtype = call.query.dtype
    is_half = dtype in _HALF
    if not (5, 0) <= capability <= (12, 1):
        yield "it needs compute capability 5.0 to 12.1"
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and is_half):
        alignment = max(alignment, 8 if is_half else 4)
    sizes = (call.head_dim, call.value.shape[-1])
    if call.key.shape[-1] != call.head_dim or any(size % alignment or not size for size in sizes):
        yield f"head dims are no multiple of {alignment}"
    if version >= (2, 15) and capability >= (8, 0) and any(
            tensor.storage_offset() % alignment for tensor in (call.query, call.key, call.value)):
        yield "an operand begins where it is not aligned"
    known = (*_HALF, torch.float32) if capability >= (8, 0) else (torch.float16, torch.float32)
    if dtype not in known:
        yield f"it takes no {str(dtype).removeprefix('torch.')} here"


def _cudnn(call: AttentionCall, capability: tuple[int, int], version: Version
           ) -> Iterator[str]:
    if torch.are_deterministic_algorithms_enabled() and (
            not torch.is_deterministic_algorithms_warn_only_enabled()):
        yield "it is not deterministic"
    if call.query.dtype not in (_HALF if capability >= (8, 0) else (torch.float16,)):
        yield "it takes float16 and bfloat16 only"
    if call.mask is not None and not _has_shape_for_cudnn(call.mask, call):
        yield "a mask of another shape, or one that needs a gradient"
    if not (8, 0) <= capability <= (12, 1):
        yield "it needs compute capability 8.0 to 12.1"
    if version >= (2, 12) and call.dropout * 16 != int(call.dropout * 16):
        yield "dropout is no multiple of 1/16"
    if version >= (2, 13) and max(call.query.shape[:2]) > _MOST_BLOCKS:
        yield f"more than {_MOST_BLOCKS} sequences or heads"
    yield from _objections_to_head_dims_of_cudnn(call, capability, version)
    if call.key.shape[-2] == 1 or (call.dropout and call.query.shape[-2] == 1):
        yield "a sequence of length 1"


def _objections_to_head_dims_of_cudnn(call: AttentionCall, capability: tuple[int, int],
                                      version: Version) -> Iterator[str]:
    keys, values = call.head_dim, call.value.shape[-1]
    if keys % 8 or values % 8:
        yield "head dims are no multiple of 8"
    is_hopper, is_new = capability == (9, 0), version >= (2, 15)
    limit = 128
    if is_hopper or (capability[0] == 10 and is_new):
        limit = 256
    elif capability[0] == 10 and (keys, values) == (192, 128):
        limit = 192
    if max(keys, values) > limit:
        yield f"head dim over {limit}"
    if is_new and max(keys, values) > 128 and call.needs_gradient and (
            (keys, values) not in ((192, 128), (256, 256))):
        yield "no backward for these head dims"


def _has_shape_for_cudnn(mask: torch.Tensor, call: AttentionCall) -> bool:
    wanted = (*call.query.shape[:3], call.key.shape[2])
    return not mask.requires_grad and mask.dim() in (2, 4) and all(
        size in (1, full) for size, full in zip(mask.shape, wanted[-mask.dim():], strict=True))


_OBJECTIONS: dict[AttentionKernel, Callable[[AttentionCall, tuple[int, int], Version],
                                            Iterator[str]]] = {
    AttentionKernel.FLASH: _flash, AttentionKernel.EFFICIENT: _efficient,
    AttentionKernel.CUDNN: _cudnn}


_KERNELS = {
    f"aten._scaled_dot_product_{part}attention.default": f"attention by {kernel}"
    for part, kernel in (("flash_", AttentionKernel.FLASH),
                         ("efficient_", AttentionKernel.EFFICIENT),
                         ("cudnn_", AttentionKernel.CUDNN))}
"""Names of kernels by their op in a joint graph."""

_COMPOSED = f"attention by {AttentionKernel.MATH}"


def kernels_of(ops: Iterable[TrainingOp], rules: Mapping[str, Iterable[str]]
               ) -> tuple[KernelChoice, ...]:
    """The attention kernels of a step, by kernel and module pattern; `rules`: by kernel, the rules
    that chose it."""
    found = Counter((_KERNELS[op.target], re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", op.module))
                    for op in ops if op.phase is Phase.FORWARD and op.target in _KERNELS)
    chosen = [KernelChoice(kernel, modules, count, " | ".join(rules.get(kernel, ())))
              for (kernel, modules), count in found.items()]
    if _COMPOSED in rules:
        chosen.append(KernelChoice(_COMPOSED, "", 0, " | ".join(rules[_COMPOSED])))
    return tuple(chosen)
