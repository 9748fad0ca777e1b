"""Every op that may write its result over an operand does so without a change in any bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from planner._graph_capture.joint_graph.inplace import inplace_candidates, overwrite, write_inplace
from planner._graph_capture.joint_graph.joint import tensors_of
from tests.support.models import Case
from tests.support.training import apply_schedule, captured, reference, train

aten = torch.ops.aten

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def own_storage(left: fx.Node, right: fx.Node) -> bool:
    """Every node of these graphs has a storage of its own, unless it is the same node."""
    return left is right


def call_graph(target: OpOverload, args: tuple, kwargs: dict) -> tuple[fx.Graph, fx.Node]:
    """A graph that calls `target` on copies of the tensors among `args`, with traced values."""
    graph = fx.Graph()
    made = {}

    def operand(value):
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            index = len(made)
            given = graph.placeholder(f"given_{index}")
            given.meta["val"] = value
            made[id(value)] = graph.call_function(aten.clone.default, (given,))
            made[id(value)].meta["val"] = value.clone()
        return made[id(value)]

    with FakeTensorMode() as mode:
        fakes = {}
        fake_args = tuple(
            fakes.setdefault(id(a), mode.from_tensor(a)) if isinstance(a, torch.Tensor) else a
            for a in args)
        nodes = tuple(operand(a) for a in fake_args)
        call = graph.call_function(target, nodes, kwargs)
        call.meta["val"] = target(*fake_args, **kwargs)
    return graph, call


def run(graph: fx.Graph, result: fx.Node, given: list[torch.Tensor]) -> torch.Tensor:
    graph.output(result)
    graph.lint()
    return fx.GraphModule({}, graph)(*given)


def check_every_candidate(target: OpOverload, args: tuple, kwargs: dict | None = None) -> int:
    """Compare each in-place run with the functional one; returns how many candidates there are."""
    kwargs = kwargs or {}
    given = list({id(a): a for a in args if isinstance(a, torch.Tensor)}.values())
    graph, call = call_graph(target, args, kwargs)
    count = len(inplace_candidates(call, own_storage))
    expected = run(graph, call, given)
    for number in range(count):
        graph, call = call_graph(target, args, kwargs)
        operand = inplace_candidates(call, own_storage)[number]
        written = write_inplace(graph, target, call.args, dict(call.kwargs), operand)
        same = graph.call_function(_returns_operand, (written, operand))
        found = run(graph, same, given)
        assert found.dtype == expected.dtype and found.stride() == expected.stride()
        assert torch.equal(found.view(torch.uint8) if found.is_floating_point() else found,
                           expected.view(torch.uint8) if found.is_floating_point() else expected)
    return count


def _returns_operand(result: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    assert result.data_ptr() == operand.data_ptr(), "the result is not in the operand's memory"
    return result


def pointwise_ops() -> list[OpOverload]:
    found = []
    for name in sorted(dir(aten)):
        packet = getattr(aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for overload in packet.overloads():
            target = getattr(packet, overload)
            schema = target._schema
            if (torch.Tag.pointwise in target.tags and not schema.is_mutable
                    and len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"):
                found.append(target)
    return found


def sample_arguments(target: OpOverload, dtype: torch.dtype) -> tuple | None:
    """Arguments of one shape for every tensor; `None` where the schema wants something unusual."""
    generator = torch.Generator().manual_seed(0)
    args = []
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() and not kind.startswith("Tensor"):
            break
        if kind == "Tensor":
            values = torch.rand(6, 10, generator=generator) * 0.8 + 0.1
            args.append((values * 10).to(dtype) if not dtype.is_floating_point
                        else values.to(dtype))
        elif kind.startswith("Optional[Tensor"):
            args.append(None)
        elif kind in ("number", "float"):
            args.append(1 if not dtype.is_floating_point else 0.5)
        elif kind == "int":
            args.append(1)
        elif kind == "bool":
            args.append(False)
        else:
            return None
    return tuple(args)


def test_every_pointwise_op_in_place_equals_the_functional_one():
    compared = 0
    for target, dtype in itertools.product(pointwise_ops(), DTYPES):
        args = sample_arguments(target, dtype)
        if args is None:
            continue
        try:
            target(*args)
            call_graph(target, args, {})
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            continue  # not for this dtype
        compared += check_every_candidate(target, args)
    assert compared > 300


@pytest.mark.parametrize("target", [
    aten.relu.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default,
    aten.tanh.default, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor,
    aten.threshold_backward.default, aten.gelu_backward.default, aten.silu_backward.default,
    aten.sigmoid_backward.default, aten.tanh_backward.default, aten.neg.default,
    aten.pow.Tensor_Scalar, aten.exp.default, aten.rsqrt.default, aten.clone.default,
])
def test_the_common_ops_have_a_candidate(target):
    args = sample_arguments(target, torch.float32)
    assert check_every_candidate(target, args) >= 1


@pytest.mark.parametrize("target", [
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default])
@pytest.mark.parametrize(("shape", "dim"), [
    ((7, 33), -1), ((7, 33), 0), ((3, 65, 129), -1), ((3, 65, 129), 1), ((2, 4, 300, 300), -1),
    ((4, 5000), -1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_softmax_gradients_are_written_over_either_operand(target, shape, dim, dtype):
    torch.manual_seed(0)
    scores = torch.randn(shape).to(dtype)
    forward = torch.softmax if target is aten._softmax_backward_data.default else torch.log_softmax
    output = forward(scores, dim)
    gradient = torch.randn(shape).to(dtype)
    assert check_every_candidate(target, (gradient, output, dim, dtype)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inside", "columns"), [(7, 3, 9), (128, 200, 64), (33, 40, 1)])
def test_products_are_added_to_their_first_operand(rows, inside, columns, dtype):
    torch.manual_seed(0)
    total, left, right = (torch.randn(4, *shape).to(dtype) for shape in (
        (rows, columns), (rows, inside), (inside, columns)))
    assert check_every_candidate(aten.baddbmm.default, (total, left, right)) == 1
    matrices = tuple(batch[0].clone() for batch in (total, left, right))
    assert check_every_candidate(aten.addmm.default, matrices) == 1


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000, 40_000])
def test_sizes_around_the_vector_width(size):
    values = torch.linspace(-3, 3, size)
    other = torch.linspace(2, 5, size)
    for target, args in (
        (aten.gelu_backward.default, (values, other)), (aten.mul.Tensor, (values, other)),
        (aten.tanh_backward.default, (values, other)), (aten.gelu.default, (values,)),
        (aten.silu_backward.default, (values, other))):
        assert check_every_candidate(target, args) >= 1


def test_an_operand_used_twice_may_still_be_overwritten():
    x = torch.randn(5, 5)
    assert check_every_candidate(aten.mul.Tensor, (x, x)) == 1


@pytest.mark.parametrize(("target", "args"), [
    (aten.add.Tensor, (torch.randn(4, 1), torch.randn(1, 4))),  # both broadcast
    (aten.add.Tensor, (torch.randn(4, 4).bfloat16(), torch.randn(4, 4))),  # second alone fits
    (aten.mm.default, (torch.randn(4, 4), torch.randn(4, 4))),  # reads rows again
    (aten.cumsum.default, (torch.randn(4, 4), 0)),
    (aten.native_dropout.default, (torch.randn(4, 4), 0.5, True)),
    (aten._softmax.default, (torch.randn(4, 4), -1, False)),
])
def test_what_is_not_offered(target, args):
    _, call = call_graph(target, args, {})
    offered = inplace_candidates(call, own_storage)
    result = call.meta["val"]
    for operand in offered:
        (value,) = tensors_of(operand.meta["val"])
        assert value.shape == result.shape and value.dtype == result.dtype
    assert len(offered) == (1 if args[0].dtype is torch.bfloat16 else 0)


def test_inputs_of_the_region_are_never_overwritten():
    graph = fx.Graph()
    with FakeTensorMode():
        given = graph.placeholder("given")
        given.meta["val"] = torch.empty(3, 3)
        call = graph.call_function(aten.relu.default, (given,))
        call.meta["val"] = torch.empty(3, 3)
    assert inplace_candidates(call, own_storage) == ()


def test_a_part_of_a_storage_is_never_overwritten():
    graph = fx.Graph()
    with FakeTensorMode():
        whole = graph.placeholder("whole")
        whole.meta["val"] = torch.empty(4, 6)
        copied = graph.call_function(aten.clone.default, (whole,))
        copied.meta["val"] = torch.empty(4, 6)
        part = graph.call_function(aten.slice.Tensor, (copied, 0, 0, 2))
        part.meta["val"] = copied.meta["val"][:2]
        call = graph.call_function(aten.relu.default, (part,))
        call.meta["val"] = torch.empty(2, 6)
        spread = graph.call_function(aten.expand.default, (copied, [4, 6]))
        spread.meta["val"] = torch.empty(1, 6).expand(4, 6)
        of_spread = graph.call_function(aten.relu.default, (spread,))
        of_spread.meta["val"] = torch.empty(4, 6)
    assert inplace_candidates(call, own_storage) == ()
    assert inplace_candidates(of_spread, own_storage) == ()


def test_a_conjugated_operand_is_not_overwritten():
    graph = fx.Graph()
    with FakeTensorMode():
        given = graph.placeholder("given")
        given.meta["val"] = torch.empty(4, dtype=torch.cfloat)
        made = graph.call_function(aten.clone.default, (given,))
        made.meta["val"] = given.meta["val"].clone()
        conjugated = graph.call_function(aten._conj.default, (made,))
        conjugated.meta["val"] = made.meta["val"].conj()
        product = graph.call_function(aten.mul.Tensor, (conjugated, given))
        product.meta["val"] = conjugated.meta["val"] * given.meta["val"]
    assert inplace_candidates(product, own_storage) == ()


def test_an_operand_that_another_operand_sees_through_a_view_is_kept():
    graph = fx.Graph()
    with FakeTensorMode():
        given = graph.placeholder("given")
        given.meta["val"] = torch.empty(4, 4)
        copied = graph.call_function(aten.clone.default, (given,))
        copied.meta["val"] = torch.empty(4, 4)
        turned = graph.call_function(aten.t.default, (copied,))
        turned.meta["val"] = copied.meta["val"].t()
        call = graph.call_function(aten.add.Tensor, (copied, turned))
        call.meta["val"] = torch.empty(4, 4)
    assert inplace_candidates(call, lambda left, right: True) == ()
    assert inplace_candidates(call, own_storage) == (copied,)


def test_an_operand_laid_out_otherwise_than_traced_is_not_overwritten():
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    strides = (x.stride(), y.stride())
    call = (aten.add_.Tensor, {}, aten.add.Tensor)
    expected = x + y
    turned = x.t().contiguous().t()
    fresh = overwrite(*call, (turned, y), {}, strides)
    assert torch.equal(fresh, expected) and torch.equal(turned, x)
    assert overwrite(*call, (x, y), {}, strides) is x and torch.equal(x, expected)
    row = torch.randn(1, 6).as_strided((1, 6), (99, 1))  # that stride says nothing
    written = overwrite(*call, (row, torch.ones(1, 6)), {}, ((6, 1), (6, 1)))
    assert written.data_ptr() == row.data_ptr() and not written._is_view()


class _BatchNormOfATransposedInput(torch.nn.Module):
    """Its kernel makes a contiguous result, its trace says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        y = self.norm(x.transpose(1, 2)).transpose(1, 2) * 0.5
        return self.second(torch.where(x > 0, x.exp(), y)) + y


def test_where_a_trace_is_wrong_the_numbers_are_right():
    torch.manual_seed(0)
    case = Case(_BatchNormOfATransposedInput(), (torch.randn(3, 6, 8),), torch.sum)
    step = captured(case)
    planned, timeline = apply_schedule(case, step, step.base.problem.keep_all_schedule)
    assert any(taken is not None for taken in timeline.inplace_of)
    assert train(planned, case).differences(reference(case)) == []


def test_an_op_without_such_a_variant_is_refused():
    graph = fx.Graph()
    given = graph.placeholder("given")
    with pytest.raises(ValueError, match=r"aten\.mm\.default has no variant"):
        write_inplace(graph, aten.mm.default, (given, given), {}, given)
