"""FLOPs against closed forms, definitions and torch's own counter; the device table."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from graph_capture.op_costs.costs import OpCosts
from graph_capture.op_costs.devices import device_model
from graph_capture.op_costs.flops import bytes_moved, op_flops
from graph_capture.twins.fake import make_twin
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
    twin = make_twin(case.model, case.args, case.kwargs)
    ours, theirs = Count(), FlopCounterMode(display=False)
    with twin.mode, theirs, ours:
        output = twin.model(*twin.args, **twin.kwargs)
        (output.loss if case.loss_fn is None else output.sum()).backward()
    known = {packet: flops for packet, flops in ours.flops.items() if packet in flop_registry}
    assert known == theirs.get_flop_counts()["Global"] and known
    assert sum(ours.flops.values()) > sum(known.values())  # pointwise work is not free


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
