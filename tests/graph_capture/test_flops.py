"""FLOPs against closed forms, definitions and torch's own counter; the device table."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import planner
from planner._graph_capture.fake_copies.fake import make_fake_copy
from planner._graph_capture.op_costs import devices
from planner._graph_capture.op_costs.costs import OpCosts
from planner._graph_capture.op_costs.devices import assumption, device_model
from planner._graph_capture.op_costs.flops import bytes_moved, op_flops
from planner.api import capture
from tests.support.models import BUILDERS

aten = torch.ops.aten


class Count(TorchDispatchMode):
    """FLOPs by op name."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[object, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        self.flops[packet] = self.flops.get(packet, 0) + op_flops(func, args, kwargs or {}, out)
        assert bytes_moved(func, args, kwargs or {}, out) >= 0
        return out


def count(target, *args, **kwargs) -> int:
    return op_flops(target, args, kwargs, target(*args, **kwargs))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "resnet", "unet", "language_model"])
def test_models_agree_with_torchs_counter_on_the_ops_that_it_knows(name):
    case = BUILDERS[name]()
    fake_copy = make_fake_copy(case.model, case.args, case.kwargs)
    ours, theirs = Count(), FlopCounterMode(display=False)
    with fake_copy.mode, theirs, ours:
        output = fake_copy.model(*fake_copy.args, **fake_copy.kwargs)
        (output.loss if case.loss_fn is None else output.sum()).backward()
    known = {packet: flops for packet, flops in ours.flops.items() if packet in flop_registry}
    assert known == theirs.get_flop_counts()["Global"] and known
    assert sum(ours.flops.values()) > sum(known.values())  # pointwise work is not free


def _empty(*shape):
    return torch.empty(shape, device="meta")


A, B, C = _empty(2, 3, 4), _empty(2, 4, 5), _empty(2, 3, 5)
X, W, Y = _empty(2, 6, 9, 9), _empty(4, 6, 3, 3), _empty(2, 4, 9, 9)
REST = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
Q, K, V = _empty(2, 4, 10, 8), _empty(2, 4, 12, 8), _empty(2, 4, 12, 16)
OUT = _empty(2, 4, 10, 16)


@pytest.mark.parametrize(("target", "args", "out"), [
    (aten.mm.default, (A[0], B[0]), C[0]),
    (aten.addmm.default, (C[0], A[0], B[0]), C[0]),
    (aten.bmm.default, (A, B), C),
    (aten.baddbmm.default, (C, A, B), C),
    (aten.convolution.default, (X, W, None, *REST), Y),
    (aten._convolution.default, (X, W, None, *REST, False, False, False, False), Y),
    (aten.convolution_backward.default, (Y, X, W, [4], *REST, [True, True, True]), (X, W, Y[0])),
    (aten._scaled_dot_product_flash_attention.default, (Q, K, V), (OUT,)),
    (aten._scaled_dot_product_efficient_attention.default, (Q, K, V, None, False), (OUT,)),
    (aten._scaled_dot_product_cudnn_attention.default, (Q, K, V, None, False), (OUT,)),
    (aten._scaled_dot_product_flash_attention_backward.default, (OUT, Q, K, V), (Q, K, V)),
    (aten._scaled_dot_product_efficient_attention_backward.default, (OUT, Q, K, V), (Q, K, V)),
    (aten._scaled_dot_product_cudnn_attention_backward.default, (OUT, Q, K, V), (Q, K, V)),
])
def test_an_op_that_torchs_counter_knows_counts_as_there(target, args, out):
    out = tree_map(torch.empty_like, out)
    theirs = flop_registry[target.overloadpacket](*args, out_val=out)
    assert op_flops(target, args, {}, out) == theirs > 0


def test_an_overload_with_a_dtype_counts_as_the_others():
    for target, args in ((aten.mm.dtype, (A[0], B[0])), (aten.bmm.dtype, (A, B)),
                         (aten.addmm.dtype, (C[0], A[0], B[0]))):
        flops = op_flops(target, (*args, torch.float32), {}, torch.empty_like(C))
        assert flops == (240 if target is aten.bmm.dtype else 120)


@pytest.mark.parametrize(("causal", "kv_heads"), [(False, 4), (True, 4), (False, 2)])
def test_cpu_attention_counts_as_its_matrix_products(causal, kv_heads):
    """2·B·H·S·T·D for the scores and as much for the values; the backward has five products."""
    q, k = torch.randn(2, 4, 10, 8), torch.randn(2, kv_heads, 12, 8)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    out = forward(q, k, k, 0.0, causal)
    one = 2 * 2 * 4 * 10 * 12 * 8
    assert op_flops(forward, (q, k, k, 0.0, causal), {}, out) == 2 * one
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert op_flops(backward, (q, q, k, k, *out, 0.0, causal), {}, (q + 1, k + 1, k + 1)) == 5 * one


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_by_definition(groups, transposed):
    x = torch.randn(3, 8, 9, 9)
    weight = torch.randn(8, 4 // groups, 3, 3) if transposed else torch.randn(4, 8 // groups, 3, 3)
    rest = ([2, 2], [1, 1], [1, 1], transposed, [0, 0], groups)
    y = aten.convolution.default(x, weight, None, *rest)
    once = 2 * weight.numel() * 3 * (81 if transposed else y[0, 0].numel())
    assert count(aten.convolution.default, x, weight, None, *rest) == once
    for mask in ([True, True, False], [False, True, False], [True, False, True]):
        flops = count(aten.convolution_backward.default, y, x, weight, [4], *rest, mask)
        assert flops == once * (mask[0] + mask[1])


def test_products():
    a, b, v = torch.randn(5, 6), torch.randn(6, 7), torch.randn(6)
    assert count(aten.mm.default, a, b) == 2 * 5 * 6 * 7
    assert count(aten.addmm.default, torch.ones(7), a, b) == 2 * 5 * 6 * 7
    assert count(aten.baddbmm.default, torch.ones(5, 7), a.expand(3, 5, 6), b.expand(3, 6, 7)) == (
        3 * 2 * 5 * 6 * 7)
    assert count(aten.mv.default, a, v) == 2 * 5 * 6
    assert count(aten.dot.default, v, v) == 2 * 6
    assert count(aten.linear.default, a, b.t().contiguous(), torch.ones(7)) == 2 * 5 * 6 * 7


def test_recurrent_layer_uses_each_weight_at_each_position():
    layer = torch.nn.LSTM(8, 16)
    counter = Count()
    with counter:
        layer(torch.randn(10, 3, 8))[0].sum().backward()
    once = 2 * 10 * 3 * (4 * 16 * 8 + 4 * 16 * 16)
    assert sum(counter.flops.values()) == pytest.approx(3 * once, rel=0.2)


def test_the_rest_counts_by_element():
    x = torch.randn(4, 10)
    assert count(aten.t.default, x) == count(aten.clone.default, x) == 0
    assert count(aten.add.Tensor, x, x[0]) == 40
    assert count(aten.add_.Tensor, x, 1) == 40
    assert count(aten.sum.dim_IntList, x, [0]) == 40
    assert count(aten._softmax.default, x, 1, False) == 200
    table, picked = torch.randn(1000, 8), torch.tensor([1, 2, 3])
    assert count(aten.embedding.default, table, picked) == 0
    rows = torch.randn(3, 8)
    assert count(aten.embedding_dense_backward.default, rows, picked, 1000, -1, False) == 24
    assert count(aten.max_pool2d_with_indices.default, torch.randn(1, 2, 8, 8), [2, 2]) == 4 * 32
    assert count(aten.index_put.default, table, [picked], rows, True) == 24


def test_bytes_count_what_is_touched():
    x = torch.randn(4, 10)
    table, picked = torch.randn(1000, 8), torch.tensor([1, 2, 3])

    def moved(target, *args):
        return bytes_moved(target, args, {}, target(*args))

    assert moved(aten.t.default, x) == 0
    assert moved(aten.add.Tensor, x, x) == 2 * 160  # the same operand twice
    assert moved(aten.add.Tensor, x, torch.randn(1, 10).expand(4, 10)) == 2 * 160 + 40
    assert moved(aten.mul_.Tensor, x, 2) == 2 * 160
    assert moved(aten.embedding.default, table, picked) == 3 * 8 * 4 * 2 + 24


def test_every_op_of_every_model_counts():
    """No op that computes is free, and none costs 1 for want of a formula."""
    for name in ("bert", "vit", "views", "many_outputs", "mlp_huge"):
        case = BUILDERS[name]()
        counter = Count()
        with counter:
            output = case.model(*case.args, **case.kwargs)
            (case.loss_fn(output) if case.loss_fn else output["loss"]).backward()
        assert counter.flops[aten.sum] > 1
        assert counter.flops[aten.addmm] > 1000


def test_device_table():
    h100 = device_model("cuda", "NVIDIA H100 80GB HBM3")
    assert (h100.name, device_model("cuda", "NVIDIA GeForce RTX 4090").name) == ("H100", "RTX 4090")
    assert device_model("cuda", "Tesla V100-SXM2-16GB").name == "V100"
    assert device_model("cuda", "NVIDIA L4").name == "L4"
    assert device_model("cuda", "NVIDIA L40S").name != "L4"
    assert device_model("cuda:1", "something new").name == "A100"
    assert h100.op_seconds(0, 0, torch.float32) == 0
    assert h100.op_seconds(1, 1, torch.float32) == pytest.approx(h100.launch_seconds, rel=1e-3)
    large = h100.op_seconds(10**15, 10**9, torch.bfloat16)
    assert 1.0 < large < 10 and large < h100.op_seconds(10**15, 10**9, torch.float32)
    assert h100.op_seconds(0, 3 * 10**12, torch.int64) == pytest.approx(1.12, rel=0.01)


def test_the_gpu_is_named_by_the_user_or_told_to_be_assumed():
    assert device_model("cuda", gpu="h100").name == device_model(
        "cuda:1", "something new", gpu="NVIDIA H100 PCIe").name == "H100"
    with pytest.raises(ValueError, match="unknown gpu 'H101'; known: B200"):
        device_model("cuda", gpu="H101")
    with pytest.raises(ValueError, match="give device='cuda' too"):
        device_model("cpu", gpu="H100")
    with pytest.raises(TypeError, match="name of a GPU"):
        device_model("cuda", gpu=100)
    assert assumption(torch.device("cpu")) is None
    assert assumption(torch.device("cuda"), "H100") is None


@pytest.mark.parametrize(("product", "told"), [
    ("", "there is no GPU here to ask"), ("Chip 9", "Chip 9 is not in the table of GPUs"),
    ("NVIDIA H200", None)])
def test_what_is_assumed_of_a_gpu_is_told(monkeypatch, product, told):
    monkeypatch.setattr(devices, "product_name", lambda device: product)
    said = assumption(torch.device("cuda"))
    assert said is None if told is None else f"{told}: gpu= names the one" in said


def test_a_plan_tells_what_it_assumed_of_the_gpu(monkeypatch):
    monkeypatch.setattr(devices, "product_name", lambda device: "Chip 9")
    model, batch = torch.nn.Linear(64, 64), torch.zeros(64, 64)
    plain = planner.plan(model, batch, device="cuda", probe=False)
    assert any("Chip 9" in note and "gpu=" in note for note in plain.notes)
    named = planner.plan(model, batch, device="cuda", probe=False, gpu="T4")
    assert not any("gpu=" in note for note in named.notes)
    assert named.peak_bytes == plain.peak_bytes
    step = capture(model, batch, device="cuda", probe=False, gpu="T4").base
    unnamed = capture(model, batch, device="cuda", probe=False).base
    assert step.graph.step_seconds > unnamed.graph.step_seconds


def test_cpu_ratio_of_product_to_pointwise_is_realistic():
    """A 1024-wide linear layer on 1024 rows takes far longer than the GELU after it."""
    cpu = device_model("cpu")
    x, weight = torch.empty(1024, 1024, device="meta"), torch.empty(1024, 1024, device="meta")
    product = (aten.mm.default, (x, weight), {}, torch.empty_like(x))
    pointwise = (aten.gelu.default, (x,), {}, torch.empty_like(x))
    seconds = [cpu.op_seconds(op_flops(*call), bytes_moved(*call), torch.float32)
               for call in (product, pointwise)]
    assert 5 < seconds[0] / seconds[1] < 60


def test_a_cpu_takes_its_time_to_draw_random_numbers_and_a_gpu_does_not():
    x = torch.empty(1024, 1024)
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    dropout = (aten.native_dropout.default, (x, 0.1, True), {}, (out, mask))
    gelu = (aten.gelu.default, (x,), {}, out)
    for device, least, most in (("cpu", 4, 10), ("cuda", 0, 3)):
        costs = OpCosts(torch.device(device), probe=False)
        ratio = costs.seconds(*dropout) / costs.seconds(*gelu)
        assert least < ratio < most
