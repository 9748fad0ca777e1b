"""Ops measured in a child process, which they may crash.

The model of the world: a kernel that checks its operands raises an error for unsuitable dummy
inputs.  A kernel that does not may read invalid memory and crash the process, or wait forever: the
backward of a fused recurrent layer reads a reserve that its forward laid out.  Such ops, and those
of other libraries, run in a child process, which is started for the first of them, and again after
a crash; a child that does not answer is ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import select
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planner._graph_capture.torch_compat import OpOverload, aten_name, pytree

_CHILD = "from planner._graph_capture.op_costs.probe import answer_questions; answer_questions()"
_LONGEST_ANSWER_SECONDS = 60.0
"""Wall-clock limit after which a child counts as hung.  Ops run several times, and are estimated to
take at most two seconds."""
_TRUSTED = frozenset({
    "_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax_backward_data",
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_safe_softmax",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_softmax_backward_data",
    "bernoulli", "bernoulli_", "binary_cross_entropy", "binary_cross_entropy_backward",
    "checkpoint_planner::realized_copy", "dot",
    "fill", "index_add", "index_add_", "index_put_", "linear", "masked_fill_", "mse_loss",
    "mse_loss_backward", "mv", "native_batch_norm", "native_batch_norm_backward",
    "nll_loss2d_backward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward",
    "normal_", "roll", "smooth_l1_loss", "smooth_l1_loss_backward", "stack", "tril", "triu",
    "uniform_", "upsample_bilinear2d_backward", "upsample_nearest2d",
    "upsample_nearest2d_backward"})
"""Ops that check their operands without a tag that says so; zero is a valid index for all of
them."""
_TRUSTED_TAGS = frozenset({torch.Tag.core, torch.Tag.pointwise, torch.Tag.reduction})
_TRUSTED_PREFIXES = ("_foreach_", "_fused_ada", "_fused_sgd")


def is_trusted(target: OpOverload) -> bool:
    """True if an op checks its operands, and may run in this process on dummy inputs."""
    name = aten_name(target)
    return name in _TRUSTED or (target.namespace in ("aten", "prims") and (
        not _TRUSTED_TAGS.isdisjoint(target.tags) or name.startswith(_TRUSTED_PREFIXES)))


def isolated_probe(device: torch.device) -> IsolatedProbe:
    """The child process for a device, under the current settings of torch."""
    return _of_process(device, torch.get_num_threads(), torch.backends.mkldnn.enabled,
                       torch.are_deterministic_algorithms_enabled())


@functools.cache
def _of_process(device: torch.device, *settings: object) -> IsolatedProbe:
    return IsolatedProbe(device)


@dataclass(frozen=True, eq=False)
class Layout:
    """Description of a strided tensor; the same object for the same tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout = torch.strided

    def stride(self) -> tuple[int, ...]:
        """The strides, as for a tensor."""
        return self.strides


class IsolatedProbe:
    """Runs ops in a child process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def measure(self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                quantity: str) -> float | None:
        """A quantity of the op, by the name of the probe's measurement; `None` if the op fails,
        crashes or hangs."""
        layouts: dict[int, Layout] = {}

        def described(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return layouts.setdefault(id(leaf), Layout(
                    tuple(map(int, leaf.shape)), tuple(map(int, leaf.stride())), leaf.dtype))
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                return leaf.node.hint
            return leaf

        try:
            told = pytree.tree_map(described, (args, dict(kwargs)))
            question = pickle.dumps((str(target), *told, quantity))
        except Exception:  # a sparse tensor, an argument that cannot be sent
            return None
        try:
            return self._ask(question)
        except Exception:  # an op that kills the child
            self._end()
            self._child = None
            return None

    def _ask(self, question: bytes) -> float | None:
        if self._child is None:
            self._child = self._start()
        assert self._child.stdin is not None and self._child.stdout is not None
        pickle.dump(question, self._child.stdin)
        self._child.stdin.flush()
        if not select.select([self._child.stdout], [], [], _LONGEST_ANSWER_SECONDS)[0]:
            self._child.kill()
        answer: float | None = pickle.load(self._child.stdout)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        self._end = weakref.finalize(self, _end, child)
        assert child.stdin is not None
        pickle.dump((self._device, torch.get_num_threads(), torch.backends.mkldnn.enabled,
                     torch.are_deterministic_algorithms_enabled()), child.stdin)
        return child


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):  # the reader of the pipe is gone
        child.communicate()
