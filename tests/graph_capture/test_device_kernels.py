"""Kernels of CUDA, chosen and counted without it.  Oracles: torch's own header of autocast, rules
written out call by call, closed forms of what attention keeps."""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from planner._graph_capture.capture import capture_step
from planner._graph_capture.device_kernels import replacement
from planner._graph_capture.device_kernels.attention import AttentionCall, choose_attention
from planner._graph_capture.device_kernels.replacement import DeviceKernels
from planner._graph_capture.errors import CaptureError
from planner._graph_capture.op_costs import cuda_workspace
from planner._graph_capture.op_costs.cuda_workspace import (
    cublas_workspace_bytes,
    cuda_workspace_bytes,
    held_workspace_bytes,
    product_workspace_bytes,
)
from planner._graph_capture.op_costs.devices import known_gpu
from planner._graph_capture.plain_step.micro_batch import trace_micro_batch
from planner._graph_capture.torch_compat.dispatch import has_kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch chooses by the GPU here")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
A100, ADA, H100, T4 = (8, 0), (8, 9), (9, 0), (7, 5)


def header_list(name: str) -> set[str]:
    """Ops of one of the lists in torch's `autocast_mode.h`."""
    path = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = path.read_text().partition(f"#define AT_FORALL_{name}(_)")[2]
    lines = text[:text.find("\n\n")].splitlines()
    found = re.findall(r"_\((\w+)(?:, (\w+))?\)", " ".join(lines))
    return {f"{op}.{overload}" if overload else op for op, overload in found
            if "imname" not in overload}


@pytest.mark.parametrize("name, ours", [
    ("FP32", replacement.FLOAT32 | {"rms_norm"}),
    ("FP32_SET_OPT_DTYPE", replacement.FLOAT32_RESULT), ("PROMOTE", replacement.WIDEST)])
def test_autocast_lists_are_those_of_torch(name, ours):
    theirs = header_list(name)
    assert len(theirs) > 8
    assert theirs | {"rms_norm"} == ours | {"rms_norm"}


def test_ops_that_autocast_lowers_have_a_kernel_of_the_cpu_or_one_of_ours():
    lower = header_list("LOWER_PRECISION_FP")
    assert lower >= replacement.LOWER
    missing = {name for name in lower - replacement.LOWER
               if (op := replacement._op(name)) is not None and not has_kernel(op, "AutocastCPU")}
    assert missing <= {"_scaled_dot_product_flash_attention", "convolution", "_convolution"}


def call(dtype=BF16, size=64, *, heads=4, groups=None, length=128, keys=None, mask=False,
         dropout=0.0, causal=False, grad=True, gqa=False):
    keys = length if keys is None else keys
    query = torch.empty(2, heads, length, size, dtype=dtype, device="meta", requires_grad=grad)
    key = torch.empty(2, groups or heads, keys, size, dtype=dtype, device="meta")
    bias = torch.empty(2, 1, length, keys, dtype=dtype, device="meta") if mask else None
    return AttentionCall(query, key, key, bias, dropout, causal, gqa)


@pytest.mark.parametrize("given, capability, kernel", [
    (call(), A100, "flash"), (call(), H100, "cudnn"), (call(), (10, 0), "cudnn"),
    (call(), (12, 0), "flash"), (call(), T4, "math"), (call(FP16), T4, "efficient"),
    (call(FP32), T4, "efficient"), (call(FP32), A100, "efficient"), (call(FP32), H100, "efficient"),
    (call(torch.float64), A100, "math"), (call(mask=True), A100, "efficient"),
    (call(mask=True), H100, "cudnn"), (call(dropout=0.125), H100, "cudnn"),
    (call(size=80), A100, "flash"), (call(size=20), A100, "flash"), (call(FP32, 20), A100,
                                                                     "efficient"),
    (call(FP32, 18), A100, "math"), (call(size=20, mask=True), A100, "math"),
    (call(size=256), A100, "flash"), (call(size=256), ADA, "flash"),
    (call(size=256, dropout=0.1), ADA, "efficient"), (call(size=224), ADA, "efficient"),
    (call(size=224, grad=False), ADA, "flash"), (call(size=264), A100, "efficient"),
    (call(causal=True), A100, "flash"), (call(causal=True, keys=256), A100, "efficient"),
    (call(groups=2, gqa=True), A100, "flash"), (call(groups=2, gqa=True), H100, "cudnn"),
    (call(groups=2, gqa=True, mask=True), H100, "cudnn"), (call(length=0), A100, "math"),
    (call(keys=1), H100, "flash"), (call(size=20), H100, "flash")])
def test_attention_is_chosen_as_by_torch(given, capability, kernel):
    choice = choose_attention(given, capability)
    assert choice.kernel == kernel
    assert f"compute capability {capability[0]}.{capability[1]}" in choice.rule


def test_switches_and_priority_are_the_callers():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose_attention(call(), H100).kernel == "efficient"
        with pytest.raises(RuntimeError, match="not efficient: it takes no float64 here"):
            choose_attention(call(torch.float64), H100)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose_attention(call(), A100).kernel == "math"
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        choice = choose_attention(call(), H100)
        assert choice.kernel == "flash" and choice.rule.endswith("; not cudnn: switched off")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_kernels_are_replaced_in_one_thread_and_for_a_while():
    x = torch.randn(2, 3, 8, 16, requires_grad=True)
    names, kernels = [], DeviceKernels(A100)

    def attend():
        names.append(F.scaled_dot_product_attention(x, x, x).grad_fn.next_functions[0][0].name())

    def chosen(kernel: str) -> bool:
        return any(kernel in each for each in kernels.rules)

    def start():
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()

    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), kernels.active():
        fake = torch.empty(2, 3, 8, 16, requires_grad=True)
        F.scaled_dot_product_attention(fake, fake, fake).sum().backward()
        assert fake.grad is not None and fake.grad.shape == fake.shape
    assert chosen("efficient")
    with kernels.active():
        start()
    attend()
    assert names == ["ScaledDotProductFlashAttentionForCpuBackward0"] * 2 or names[0] == names[1]


def test_autocast_is_that_of_cuda():
    kernels, x = DeviceKernels(A100), torch.randn(4, 8)
    found = {}
    for on_device in (True, False):
        with warnings.catch_warnings(), torch.autocast("cpu", BF16):
            warnings.simplefilter("error")
            if on_device:
                with kernels.active():
                    h = x @ x.T
                    found[on_device] = [h, F.layer_norm(h, (4,)), h.softmax(-1), h.exp(), h.sum(),
                                        F.softmax(h, -1, dtype=BF16), h + 1, F.gelu(h)]
            else:
                h = x @ x.T
                found[on_device] = [h, F.layer_norm(h, (4,)), h.softmax(-1), h.exp(), h.sum(),
                                    F.softmax(h, -1, dtype=BF16), h + 1, F.gelu(h)]
    assert [t.dtype for t in found[True]] == [BF16, FP32, FP32, FP32, FP32, BF16, BF16, BF16]
    assert [t.dtype for t in found[False]] == [BF16] * 8


def test_what_only_the_cpu_casts_is_left_as_it_is():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._log_softmax.default:
                found.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    logits, targets, found = torch.randn(4, 8, dtype=BF16), torch.zeros(4, dtype=torch.long), []
    with torch.autocast("cpu", BF16), Seen():
        with DeviceKernels(A100).active():
            F.cross_entropy(logits, targets)
        F.cross_entropy(logits, targets)
    assert found == [BF16, FP32]


class Block(nn.Module):
    """Attention, normalization and dropout."""

    def __init__(self, *, kernel: SDPBackend | None = None):
        super().__init__()
        self.qkv, self.norm, self.kernel = nn.Linear(64, 192), nn.LayerNorm(64), kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, 4, 16).permute(2, 0, 3, 1, 4)
        if self.kernel is None:
            out = F.scaled_dot_product_attention(*heads, is_causal=True)
        else:
            with sdpa_kernel(self.kernel):
                out = F.scaled_dot_product_attention(*heads, is_causal=True)
        out = out.transpose(1, 2).reshape(batch, length, 64)
        return F.dropout(out, 0.1, self.training) + torch.zeros(64, dtype=x.dtype, device=x.device)


def captured(model, x, **arguments):
    return capture_step(model, (x,), loss_fn=lambda out: out.float().square().mean(),
                        device="cuda", probe=False, **arguments)


@pytest.mark.parametrize("dtype, gpu, kernel, own", [
    (BF16, "H100", "cudnn", None), (BF16, "A100", "flash", None), (FP32, "A100", "efficient", None),
    (BF16, "A100", "efficient", SDPBackend.EFFICIENT_ATTENTION),
    (BF16, "A100", "math", SDPBackend.MATH)])
def test_a_captured_step_has_the_kernels_of_the_device(dtype, gpu, kernel, own):
    x = torch.empty(2, 256, 64, dtype=dtype, device="meta", requires_grad=True)
    step = captured(Block(kernel=own).to("meta", dtype), x, gpu=gpu)
    targets = [op.target for op in step.graph.ops]
    assert [each.kernel for each in step.graph.kernels] == [f"attention by {kernel}"]
    assert not any("_for_cpu" in target or "mkldnn" in target for target in targets)
    if kernel != "math":
        assert f"aten._scaled_dot_product_{kernel}_attention.default" in targets
        assert f"aten._scaled_dot_product_{kernel}_attention_backward.default" in targets
    norm = next(op for op in step.graph.ops if "native_layer_norm." in op.target)
    assert norm.result.count("float32") == (2 if dtype is BF16 else 3)  # mean and deviation


def test_without_scores_a_step_takes_less_by_their_size():
    x = torch.empty(2, 1024, 64, dtype=BF16, device="meta", requires_grad=True)
    model = Block().to("meta", BF16)
    flash = captured(model, x, gpu="A100").baseline.peak_bytes
    with sdpa_kernel(SDPBackend.MATH):
        composed = captured(model, x, gpu="A100").baseline.peak_bytes
    scores = 2 * 4 * 1024 * 1024
    assert composed - flash > 2 * scores * 2  # at the least the probabilities and their gradient


def test_models_on_meta_and_in_memory_give_the_same_graph():
    digests = []
    for device in ("meta", "cpu"):
        x = torch.zeros(2, 64, 64, device=device, requires_grad=True)
        step = captured(Block().to(device), x, gpu="RTX 4090")
        digests.append([(op.name, op.digest) for op in step.graph.ops])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("dtype, kernel", [(FP32, "cudnn"), (BF16, "torch"), (FP16, "torch")])
def test_batch_norm_of_the_plain_step_is_by_cudnn_where_torch_takes_it(dtype, kernel):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to("meta", dtype)
    x = torch.empty(4, 3, 16, 16, dtype=dtype, device="meta")
    step = captured(model, x, gpu="A100")
    kernels = step.tracing.fake_copy.kernels
    assert kernels is not None
    step.tracing.plain_step(step.tracing.loss_fn)
    assert set(kernels.rules) == {f"batch norm by {kernel}"}


def test_recurrent_layers_are_captured_op_by_op_as_torch_compile_has_them_on_cuda():
    x = torch.empty(5, 2, 8, device="meta")
    model = nn.LSTM(8, 16).to("meta")
    step = capture_step(model, (x,), loss_fn=lambda out: out[0].sum(), device="cuda", probe=False)
    targets = {op.target for op in step.graph.ops}
    assert "aten.sigmoid.default" in targets and not any("rnn" in each for each in targets)
    plain = trace_micro_batch(
        step.tracing.fake_copy, step.tracing.loss_fn, workspace=lambda *call: 0
    )
    ops = {run.op for run in plain.trace.runs}
    assert "aten.sigmoid" in ops and not any("rnn" in each for each in ops)


def test_root_mean_square_normalization_has_the_backward_of_its_kernel():
    x = torch.empty(4, 16, 64, device="meta", dtype=BF16, requires_grad=True)
    step = captured(nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64)).to("meta", BF16), x)
    backward = [op for op in step.graph.ops if "_fused_rms_norm_backward" in op.target]
    assert len(backward) == 1
    x = torch.randn(4, 16, requires_grad=True)
    assert F.rms_norm(x, [16]).grad_fn.name() == "MulBackward0"


def around_attention(module, x, mask, **arguments):
    step = capture_step(module, (x, mask), loss_fn=lambda out: out.float().sum(), probe=False,
                        **arguments)
    # The result of attention has other strides, and so has what is made of it.
    return [(op.target, op.result.partition("/")[0]) for op in step.graph.ops
            if op.target.partition(".")[2] in ("scalar_tensor.default", "where.self",
                                               "native_dropout_backward.default", "clone.default")]


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(x, x, x, mask)
        return F.dropout(out, 0.1, False) + F.dropout(out, 0.3, True)


def test_what_stands_around_attention_is_composed_as_torch_composes_it():
    x = torch.empty(2, 4, 32, 16, device="meta", requires_grad=True)
    mask = torch.zeros(2, 1, 32, 32, dtype=torch.bool, device="meta")
    ours = around_attention(Masked(), x, mask, device="cuda")
    assert ours == around_attention(Masked(), x, mask, device="cpu")
    assert {target for target, _ in ours} >= {
        "aten.where.self", "aten.native_dropout_backward.default"}


def test_autocast_of_a_captured_step_is_that_of_cuda():
    x = torch.empty(2, 32, 64, device="meta")
    step = captured(Block().to("meta"), x, gpu="A100", autocast=BF16)
    norm = next(op for op in step.graph.ops if "native_layer_norm." in op.target)
    assert "bfloat16" not in norm.result
    assert any("flash" in each.kernel for each in step.graph.kernels)


def test_no_kernel_is_an_error_that_says_why():
    x = torch.empty(2, 32, 64, device="meta", dtype=torch.float64)
    with pytest.raises(CaptureError, match="not flash: it takes float16 and bfloat16 only"):
        captured(Block(kernel=SDPBackend.FLASH_ATTENTION).to("meta", torch.float64), x)


def test_workspace_of_attention_and_embeddings_is_what_their_code_asks_for():
    # Heads of a token side by side, as a model's projections make them.
    query = torch.empty(2, 100, 8, 64, dtype=BF16, device="meta").transpose(1, 2)
    key = torch.empty(2, 2, 100, 64, dtype=BF16, device="meta")
    name = "_scaled_dot_product_flash_attention"
    assert workspace(name, query, key, key) == 0
    assert workspace(f"{name}_backward", query, query, key, key) == (
        2 * 8 * 128 * (64 + 1) * 4 + 2 * (2 * 8 * 100 * 64 * 2))
    plain = query.float()
    assert workspace("_scaled_dot_product_efficient_attention_backward",
                     plain, plain, plain, plain) == 2 * 8 * 100 * (64 + 2) * 4
    apart = plain.contiguous()
    assert workspace("_scaled_dot_product_efficient_attention_backward",
                     apart, plain, plain, plain) == 2 * 8 * 100 * (64 + 2 + 64) * 4
    indices = torch.empty(64, 128, dtype=torch.long, device="meta")
    gradient = torch.empty(64, 128, 48, dtype=BF16, device="meta")
    assert workspace("embedding_dense_backward", gradient, indices, 1000) == (
        (819 + 1000) * 64 * 4 + 6 * 8192 * 8)
    assert workspace("mm", query, key) is None


@pytest.mark.parametrize(("gpu", "shape", "dims", "dtype", "said_by_torch"), [
    ("A100", (1024, 8000), [0], BF16, 65_536_252), ("A100", (65536, 512), [0], BF16, 113_246_224),
    ("A100", (65536, 512), [1], BF16, 0), ("A100", (255, 512), [0], BF16, 0)])
def test_workspace_of_a_sum_is_what_torch_takes(gpu, shape, dims, dtype, said_by_torch):
    # By torch 2.15 with CUDA, on a device whose kernels do nothing (benchmarks/no_device).
    x = torch.empty(shape, dtype=dtype, device="meta")
    assert workspace("sum", x, dims, gpu=gpu) == said_by_torch


@pytest.mark.parametrize(("shape", "capability", "said"), [
    ((2, 8, 96, 160), (9, 0), ("cudnn", "cudnn", "flash")),
    ((2, 8, 96, 256), (9, 0), ("cudnn", "cudnn", "cudnn")),
    ((2, 8, 96, 256), (10, 0), ("flash", "flash", "cudnn")),
    ((65536, 1, 16, 64), (9, 0), ("cudnn", "cudnn", "efficient")),
    ((8, 96, 64), (8, 0), ("math", "math", "flash"))])
def test_versions_of_torch_choose_attention_as_they_said_themselves(shape, capability, said):
    # By torch 2.11.0, 2.12.1 and 2.15.0 with CUDA (benchmarks/attention_choice.py).
    x = torch.empty(shape, dtype=BF16, device="meta", requires_grad=True)
    call = AttentionCall(x, x, x, None, 0.0, False, False)
    assert said == tuple(choose_attention(call, capability, version).kernel
                         for version in ((2, 11), (2, 12), (2, 15)))


def test_the_workspace_of_cublas_is_held_until_torch_2_15(monkeypatch):
    found = {gpu: [cublas_workspace_bytes(known_gpu(gpu), (2, minor)) >> 20 for minor in (11, 12)]
             for gpu in ("A100", "RTX 4090", "H100", "B200", "RTX 5090")}
    assert found == {"A100": [8, 8], "RTX 4090": [8, 8], "H100": [32, 32], "B200": [8, 32],
                     "RTX 5090": [8, 32]}
    h100 = known_gpu("H100")
    monkeypatch.setattr(cuda_workspace, "INSTALLED", (2, 12))
    assert held_workspace_bytes(h100) == 32 << 20 and product_workspace_bytes("mm", h100) == 0
    monkeypatch.setattr(cuda_workspace, "INSTALLED", (2, 15))
    assert held_workspace_bytes(h100) == 0 and product_workspace_bytes("mm", h100) == 32 << 20
    assert product_workspace_bytes("addmm", h100) == 1 << 20
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert held_workspace_bytes(h100) == 8_519_680 and product_workspace_bytes("mm", h100) == 0


def workspace(name, *args, gpu="A100"):
    return cuda_workspace_bytes(name, args, known_gpu(gpu))
