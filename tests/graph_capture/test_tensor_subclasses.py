"""Parameters that are tensor subclasses: quantized weights, without any library of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import planner
from planner._graph_capture.fake_copies.fake import make_fake_copy
from planner._graph_capture.fake_copies.storage_less import storage_less_copy
from planner._graph_capture.memory.allocator import record_peak
from planner._graph_capture.memory.sparse import strided_tensors
from planner._graph_capture.op_costs.isolated import is_trusted
from planner._graph_capture.optimizer.step import trace_optimizer_steps
from planner._graph_capture.plain_step.micro_batch import resident_blocks
from planner.errors import CaptureError

aten = torch.ops.aten


class Int8(torch.Tensor):
    """A wrapper subclass: 8-bit values, and one scale for each row."""

    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values, scale):
        self.values_, self.scale = values, scale

    @classmethod
    def of(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["values_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inside, context, size, stride):
        return cls(inside["values_"], inside["scale"])

    def dequantized(self):
        return self.values_.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return cls(args[0].values_.detach(), args[0].scale.detach())
        if func is aten._to_copy.default and not kwargs:
            return cls(args[0].values_.clone(), args[0].scale.clone())
        if func is aten.copy_.default and isinstance(args[0], cls):
            plain = args[1].dequantized() if isinstance(args[1], cls) else args[1]
            made = cls.of(plain)
            args[0].values_.copy_(made.values_), args[0].scale.copy_(made.scale)
            return args[0]
        plain = torch.utils._pytree.tree_map_only(cls, cls.dequantized, (args, kwargs))
        return func(*plain[0], **plain[1])


@dataclass
class Scales:
    """What a packed weight needs to be read."""

    scale: torch.Tensor
    shape: tuple[int, int]
    inner: Scales | None = None


class Packed(nn.Parameter):
    """A parameter whose class says how it is read, by an object that holds tensors."""

    def __new__(cls, data, state=None):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.state = state
        return made

    @classmethod
    def of(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        inner = Scales(scale.mean().clone(), tuple(scale.shape))
        return cls((weight / scale).round().to(torch.int8).flatten(),
                   Scales(scale, tuple(weight.shape), inner))

    def read(self):
        return self.view(self.state.shape).to(torch.float32) * self.state.scale


class PackedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = Packed.of(linear.weight.data)

    def forward(self, x):
        assert isinstance(self.weight, Packed)
        return F.linear(x, self.weight.read())


def wrapped(linear):
    linear.weight = nn.Parameter(Int8.of(linear.weight.data), requires_grad=False)
    return linear


class Block(nn.Module):
    """A frozen, quantized layer and a small one that is trained."""

    def __init__(self, quantize, width):
        super().__init__()
        self.base = quantize(nn.Linear(width, width, bias=False))
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


def model_of(quantize, width=128, depth=6):
    torch.manual_seed(0)
    return Model(*(Block(quantize, width) for _ in range(depth)))


KINDS = {"wrapper": wrapped, "parameter with a state": PackedLinear}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def quantize(request):
    return request.param


def batch():
    return torch.randn(96, 128, generator=torch.Generator().manual_seed(0))


def held_bytes(model):
    """Of all that the model's tensors consist of."""
    tensors = strided_tensors(list(model.parameters()))
    for parameter in model.parameters():
        state = getattr(parameter, "state", None)
        while state is not None:
            tensors.append(state.scale)
            state = state.inner
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def test_what_a_quantized_weight_consists_of_is_resident(quantize):
    model = model_of(quantize)
    fake_copy = make_fake_copy(model, (batch(),))
    resident = fake_copy.resident
    assert resident.parameters_bytes + resident.buffers_bytes == held_bytes(model)
    blocks = resident_blocks(fake_copy, resident)
    assert sum(block.size_bytes for block in blocks) == held_bytes(model) + batch().nbytes


def test_copies_without_data_are_of_the_same_class(quantize):
    model = model_of(quantize)
    again = storage_less_copy(make_fake_copy(model, (batch(),)))
    for (name, real), copy in zip(model.named_parameters(), again.model.parameters(), strict=True):
        assert type(copy) is type(real), name
        assert isinstance(copy, nn.Parameter)
        assert (copy.shape, copy.dtype, copy.requires_grad) == (
            real.shape, real.dtype, real.requires_grad)
    if quantize is PackedLinear:
        state, own = again.model[0].base.weight.state, model[0].base.weight.state
        assert state is not own and state.inner.scale is not own.inner.scale
        assert (state.shape, state.scale.shape) == (own.shape, own.scale.shape)


@pytest.mark.parametrize("budget", [None, "70%"])
def test_a_plan_trains_a_quantized_base_as_predicted(quantize, budget):
    plain, model = model_of(quantize), model_of(quantize)
    plan = planner.plan(model, batch(), budget=budget)
    planned = plan.apply(model)
    for _ in range(2):
        losses = [each(batch()) for each in (plain, planned)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == losses[1].item()
    for (name, expected), found in zip(plain.named_parameters(), planned.parameters(),
                                       strict=True):
        assert (expected.grad is None) == (found.grad is None), name
        assert expected.grad is None or torch.equal(expected.grad, found.grad), name
    planned.zero_grad()
    del losses, loss
    x = batch()
    measured = record_peak(lambda: planned(x).backward(), "cpu").peak_bytes
    assert measured == plan.peak_bytes - plan.resident_bytes
    if budget:
        assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes


def test_a_dequantized_weight_is_made_again_instead_of_saved(quantize):
    plan = planner.plan(model_of(quantize), batch(), budget="70%")
    assert any(".base" in line for line in str(plan).splitlines() if " B " in line)


def test_within_trains_a_quantized_base(quantize):
    plain, model = model_of(quantize), model_of(quantize)
    planner.within(model, "80%")
    losses = {}
    for name, each in {"plain": plain, "planned": model}.items():
        trained = [p for p in each.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-2)
        losses[name] = []
        for _ in range(3):
            loss = each(batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["plain"] == losses["planned"]
    assert planner.steps_of(model).planned == 3


class EightBit(Optimizer):
    """Sign of an average of gradients that is kept in 8 bits."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})
        self.table = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = Int8(torch.zeros_like(p, dtype=torch.int8),
                                            p.new_ones(len(p), 1))
                state["average"].copy_(torch.compile(_averaged)(state["average"], p.grad))
                p.sub_(state["average"].dequantized().sign(), alpha=group["lr"])


def _averaged(average, gradient):
    return average.dequantized().lerp(gradient, 0.1)


def test_state_of_tensor_subclasses_is_counted():
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16, bias=False))
    memory = trace_optimizer_steps(
        EightBit(model.parameters()), make_fake_copy(model, (torch.ones(2, 64),))
    )
    elements, rows = 64 * 32 + 32 * 16, 32 + 16
    assert memory.state_bytes == elements + 4 * rows + 4 * 256
    assert memory.step_peak_bytes >= 4 * 64 * 32


@pytest.fixture
def custom_op():
    """An op that doubles, with a backward and without a fake kernel."""
    library = torch.library.Library("tests_of_subclasses", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CPU")
    torch.library.register_autograd("tests_of_subclasses::doubled",
                                    lambda _, gradient: gradient * 2, lib=library)
    yield library
    library._destroy()


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = torch.ops.tests_of_subclasses.doubled(torch.tanh(self.first(x)))
        return self.second(x).square().mean()


def test_an_op_without_a_fake_kernel_is_named(custom_op):
    with pytest.raises(CaptureError, match=(
            r"tests_of_subclasses::doubled has no fake kernel.*"
            r'torch.library.register_fake\("tests_of_subclasses::doubled"\)')):
        planner.plan(Custom(), torch.ones(8, 16))


def test_an_op_with_a_fake_kernel_is_planned(custom_op):
    torch.library.register_fake("tests_of_subclasses::doubled", torch.empty_like, lib=custom_op)
    torch.manual_seed(0)
    model, x = Custom(), torch.randn(8, 16)
    planned = planner.plan(model, x).apply(model)
    assert planned(x).item() == model(x).item()
    assert not is_trusted(torch.ops.tests_of_subclasses.doubled.default)


def test_optimizers_of_libraries_by_name():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"unknown optimizer 'adamw9bit'.*adafactor.*adamw8bit"):
        planner.plan(model, torch.ones(2, 4), optimizer="adamw9bit")
    with pytest.raises(ValueError, match="pip install -U schedulefree"):
        planner.plan(model, torch.ones(2, 4), optimizer="adamw_schedulefree")
