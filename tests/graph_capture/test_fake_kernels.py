"""The fake kernels that are put right, against the real ones."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import planner._graph_capture.torch_compat  # noqa: F401  puts them right

pytestmark = pytest.mark.compat
aten = torch.ops.aten


def layouts(results):
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes())
            for t in pytree.tree_leaves(results) if t is not None]


def compare(target, *args):
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(
            torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), args)
        fake = layouts(target(*fakes))
    assert fake == layouts(target(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matrix_product(dtype):
    rows, weight = torch.randn(12, 16).to(dtype), torch.randn(3, 16, 8).to(dtype)
    offsets = torch.tensor([3, 7, 12], dtype=torch.int32)
    compare(aten._grouped_mm.default, rows, weight, offsets)
    compare(aten._grouped_mm.default, torch.randn(16, 16).to(dtype)[:, :12], rows, offsets[:1])


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("grad", [True, False])
def test_fused_lstm(steps, grad):
    x, state = torch.randn(steps, 4, 8), torch.zeros(4, 16)
    weights = torch.randn(64, 8), torch.randn(64, 16), torch.randn(64), torch.randn(64)
    with torch.set_grad_enabled(grad):
        if grad:
            compare(aten.mkldnn_rnn_layer.default, x, *weights, state, state, False, [], 2, 16, 1,
                    True, False, False, True)
        else:
            with FakeTensorMode(allow_non_fake_inputs=True):
                *_, reserve = aten.mkldnn_rnn_layer.default(
                    x, *weights, state, state, False, [], 2, 16, 1, True, False, False, True)
            assert reserve.numel() == 0


def test_reserve_of_a_long_fused_lstm():
    x, state = torch.randn(80, 32, 32), torch.zeros(32, 64)
    weights = torch.randn(256, 32), torch.randn(256, 64), torch.randn(256), torch.randn(256)
    rest = (state, state, False, [], 2, 64, 1, True, False, False, True)
    *_, expected = aten.mkldnn_rnn_layer.default(x, *weights, *rest)
    with FakeTensorMode(allow_non_fake_inputs=True):
        *_, reserve = aten.mkldnn_rnn_layer.default(x, *weights, *rest)
    assert reserve.numel() == pytest.approx(expected.numel(), rel=0.02)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtypes", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16)])
@pytest.mark.parametrize("x", [
    torch.randn(4, 50, 16).transpose(1, 2), torch.randn(4, 6, 16, 6).transpose(1, 2),
    torch.randn(4, 16, 6, 6).to(memory_format=torch.channels_last), torch.randn(4, 16)])
def test_batch_normalization(x, dtypes, training):
    x, weight, mean = x.to(dtypes[0]), *(torch.ones(16, dtype=dtypes[1]) for _ in range(2))
    compare(aten.native_batch_norm.default, x, weight, weight, mean, mean, training, 0.1, 1e-5)
    compare(aten._native_batch_norm_legit.no_stats, x, weight, weight, True, 0.1, 1e-5)
    compare(aten._native_batch_norm_legit_functional.default, x, weight, weight, mean, mean,
            training, 0.1, 1e-5)
    saved = aten.native_batch_norm(x, weight, weight, mean, mean, training, 0.1, 1e-5)[1:]
    for gradient in (x, x.contiguous()):
        compare(aten.native_batch_norm_backward.default, gradient, x, weight, mean, mean, *saved,
                training, 1e-5, [True, True, True])
    compare(aten.native_batch_norm_backward.default, x, x, None, mean, mean, *saved, training,
            1e-5, [True, False, False])
