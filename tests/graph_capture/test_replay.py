"""What may run again, and that it then gives the same numbers."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from planner._graph_capture.joint_graph.replay import (
    COPY_LIMIT_BYTES,
    CPU_GENERATOR_STATE_BYTES,
    draw,
    is_random,
    new_state,
    original_call,
    replay,
    replay_of,
)
from planner._graph_capture.torch_compat import FakeTensorMode
from tests.support.models import Case
from tests.support.regions import lowered
from tests.support.training import apply_schedule, captured, random_schedule, reference, train

pytestmark = pytest.mark.compat

aten = torch.ops.aten

x, p = torch.rand(40), torch.full((40,), 0.3)
RANDOM_CALLS = {
    "native_dropout": (aten.native_dropout.default, (x, 0.5, True), {}),
    "bernoulli": (aten.bernoulli.default, (p,), {}),
    "bernoulli.p": (aten.bernoulli.p, (x, 0.5), {}),
    "rand_like": (aten.rand_like.default, (x,), {}),
    "randn_like": (aten.randn_like.default, (x,), {}),
    "randint": (aten.randint.low, (0, 9, [40]), {}),
    "randperm": (aten.randperm.default, (40,), {}),
    "multinomial": (aten.multinomial.default, (p, 10), {}),
    "normal": (aten.normal.Tensor_float, (x, 2.0), {}),
    "rrelu": (aten.rrelu_with_noise_functional.default, (x - 0.5, p, 0.1, 0.3, True), {}),
    "poisson": (aten.poisson.default, (x,), {}),
    "attention with dropout": (
        aten._scaled_dot_product_attention_math.default,
        (torch.rand(1, 2, 4, 8),) * 3, {"dropout_p": 0.5}),
}


def tensors(result):
    return result if isinstance(result, tuple) else (result,)


CPU = torch.device("cpu")


def run(call):
    target, args, kwargs = call
    return target(*args, **kwargs)


@pytest.mark.parametrize("name", RANDOM_CALLS)
def test_a_random_op_replays_its_numbers_and_leaves_the_generator(name):
    target, args, kwargs = RANDOM_CALLS[name]
    assert is_random(call_node(target, args, kwargs))
    torch.manual_seed(1)
    expected, after = tensors(target(*args, **kwargs)), torch.get_rng_state()
    torch.manual_seed(1)
    *first, state = run(draw(target, args, kwargs, CPU))
    assert torch.equal(torch.get_rng_state(), after)
    assert state.numel() == CPU_GENERATOR_STATE_BYTES
    torch.rand(1000)  # other draws in between
    before = torch.get_rng_state()
    again = tensors(run(replay(target, args, kwargs, CPU, state)))
    assert torch.equal(torch.get_rng_state(), before)
    for original, one, other in zip(expected, first, again, strict=True):
        assert torch.equal(original, one) and torch.equal(one, other)


@pytest.mark.parametrize("name", RANDOM_CALLS)
def test_on_fake_tensors_companions_make_what_they_make_and_draw_nothing(name):
    target, args, kwargs = RANDOM_CALLS[name]
    real = run(draw(target, args, kwargs, CPU))
    before = torch.get_rng_state()
    with FakeTensorMode() as mode:
        operands = tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args)
        *drawn, state = run(draw(target, operands, kwargs, CPU))
        again = tensors(run(replay(target, operands, kwargs, CPU, state)))
    assert torch.equal(torch.get_rng_state(), before)
    assert (state.shape, state.dtype) == (real[-1].shape, real[-1].dtype)
    for fake, other, expected in zip(drawn, again, real, strict=False):
        assert fake.shape == other.shape == expected.shape
        assert fake.dtype == other.dtype == expected.dtype
        assert fake.stride() == other.stride() == expected.stride()


def test_companions_cost_what_the_op_costs_and_a_replay_sets_a_state_aside():
    target, args, kwargs = RANDOM_CALLS["attention with dropout"]
    assert original_call(aten.relu.default, {}) == (aten.relu.default, {}, 0)
    for (companion, _, given), beyond in (
            (draw(target, args, kwargs, CPU), 0),
            (replay(target, args, kwargs, CPU, new_state(CPU)), CPU_GENERATOR_STATE_BYTES)):
        assert original_call(companion, given) == (target, kwargs, beyond)


def test_to_draw_is_never_dead_code_and_to_replay_may_be():
    target, args, kwargs = RANDOM_CALLS["native_dropout"]
    assert call_node(*draw(target, args, kwargs, CPU)).is_impure()
    assert not call_node(*replay(target, args, kwargs, CPU, new_state(CPU))).is_impure()


def test_the_generator_is_put_back_after_an_error():
    target, args, kwargs = RANDOM_CALLS["multinomial"]
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):  # more than there are, without replacement
        run(replay(target, (args[0], 41), kwargs, CPU, new_state_at(3)))
    assert torch.equal(torch.get_rng_state(), before)


def new_state_at(seed):
    return torch.Generator().manual_seed(seed).get_state()


def call_node(target, args, kwargs=None) -> fx.Node:
    graph = fx.Graph()

    def operand(value):
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("given")
        node.meta["val"] = value
        return node

    return graph.call_function(target, tuple(operand(a) for a in args), kwargs or {})


QKV = (torch.rand(1, 2, 4, 8),) * 3


@pytest.mark.parametrize(("args", "kwargs", "random"), [
    ((*QKV,), {}, False), ((*QKV, 0.0), {}, False), ((*QKV, 0.1), {}, True),
    ((*QKV,), {"dropout_p": 0.0}, False), ((*QKV,), {"dropout_p": 0.2}, True)])
def test_attention_is_random_only_with_dropout(args, kwargs, random):
    target = aten._scaled_dot_product_flash_attention.default
    assert is_random(call_node(target, args, kwargs)) is random


def test_ordinary_ops_are_not_random():
    assert not is_random(call_node(aten.mm.default, (x.view(5, 8), x.view(8, 5))))
    assert not is_random(call_node(len, ()))


@pytest.mark.parametrize(("target", "args", "reason"), [
    (aten.empty_like.default, (x,), "uninitialised"),
    (aten.new_empty.default, (x, [3]), "uninitialised"),
    (aten.add_.Tensor, (x, x), "writes into its inputs"),
    (len, (), "not a torch op"),
    (torch.ops.higher_order.cond, (), "higher-order op cond"),
])
def test_what_is_pinned_and_why(target, args, reason):
    assert reason in replay_of(call_node(target, args), lambda node: False).pinned


def test_collectives_are_pinned():
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    importlib.import_module("torch.distributed._functional_collectives")  # registers the ops
    node = call_node(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    assert replay_of(node, lambda n: False).pinned == "collective communication"


def test_small_mutated_inputs_are_copied_and_large_ones_pin_the_op():
    small = replay_of(call_node(aten.mul.Tensor, (x, p)), lambda node: True)
    assert not small.pinned and len(small.copied_inputs) == 2
    assert small.state_bytes(torch.device("cpu")) == 2 * 40 * 4
    large = torch.empty(COPY_LIMIT_BYTES // 4 + 1)
    node = call_node(aten.relu.default, (large,))
    assert "state that the step mutates" in replay_of(node, lambda n: True).pinned


def test_the_memory_of_a_replay():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    dropout = replay_of(call_node(*RANDOM_CALLS["native_dropout"][:2]), lambda node: False)
    assert dropout.random and not dropout.pinned
    assert dropout.state_bytes(cpu) == dropout.workspace_bytes(cpu) == CPU_GENERATOR_STATE_BYTES
    assert dropout.state_bytes(cuda) == dropout.workspace_bytes(cuda) == 0
    plain = replay_of(call_node(aten.relu.default, (x,)), lambda node: False)
    assert plain.state_bytes(cpu) == plain.workspace_bytes(cpu) == 0


class _ReadsWhatItMutates(nn.Module):
    """Ops that read a buffer before and after the step changes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(size))

    def forward(self, inputs):
        hidden = torch.tanh(self.layer(inputs) + self.scale[:8])
        self.scale.add_(0.5)
        hidden = torch.sigmoid(hidden - self.scale[:8].view(1, 8)) * self.scale[:8].exp()
        self.scale.mul_(1.5)
        return (hidden * self.scale[:8]).exp()


@pytest.mark.parametrize("size", [8, COPY_LIMIT_BYTES // 4 + 1])
@pytest.mark.parametrize("seed", range(3))
def test_state_that_the_step_mutates_is_read_as_it_was(size, seed):
    torch.manual_seed(0)
    case = Case(_ReadsWhatItMutates(size), (torch.randn(4, 8),), torch.sum)
    step = captured(case)
    pinned = [op.name for op in step.base.graph.ops if "mutates" in op.pinned]
    assert bool(pinned) is (size > 8)
    planned, _ = apply_schedule(case, step, random_schedule(step.base.problem, seed, 1.0))
    assert train(planned, case).differences(reference(case)) == []


def test_attention_without_dropout_needs_no_generator():
    class Attention(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.qkv, self.dropout = nn.Linear(8, 24), dropout

        def forward(self, inputs):
            q, k, v = self.qkv(inputs).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)

    batch = torch.randn(2, 16, 8)
    for dropout in (0.0, 0.5):
        region = lowered(Attention(dropout), batch, loss_fn=torch.sum)
        assert any(op.replay.random for op in region.ops) is (dropout > 0)
