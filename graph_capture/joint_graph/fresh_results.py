"""Ops that overwrite a whole operand, called without it.

`torch.empty_like(x).normal_()` becomes, in a functional graph, a random op with the empty tensor as
an operand, of which it reads only the layout.  The operand uses memory, and cannot be recomputed if
it is not initialised.  Here such a call becomes one op that allocates its result and writes it in
place, as the plain step does: the same kernel on the same layout, so that random numbers are the
same.  A copy in the layout of its source is a clone, which costs nothing where the source is dead
then; one that is scattered into another tensor is replaced by its source.  Dropout on a CPU becomes
the fill of its mask and two products.

Other uninitialised memory in the forward, which is written part by part, starts as zeros, so that a
second run gives the same bytes.

Blind spot: a program whose result depends on uninitialised memory finds zeros there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from planner._graph_capture.joint_graph.joint import (
    Emitter,
    JointGraph,
    eliminate_dead_code,
    is_tuple_element,
)
from planner._graph_capture.joint_graph.lower import last_forward_node
from planner._graph_capture.joint_graph.replay import UNINITIALISED
from planner._graph_capture.torch_compat import OpOverload, same_sizes, schema_of
from planner._graph_capture.torch_compat.dispatch import define_op

_aten = torch.ops.aten
_LAYOUT = "SymInt[] size, SymInt[] strides, ScalarType dtype, Device device"


@dataclass(frozen=True, slots=True)
class _Overwriting:
    """An op of functional graphs that reads nothing of one of its operands."""

    inplace: OpOverload
    """The op that writes into that operand."""
    position: int = 0
    """Position of the operand."""

    def run(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype,
            device: torch.device, *others: Any, **kwargs: Any) -> Any:
        """Run the op on newly allocated memory."""
        written = torch.empty_strided(size, stride, dtype=dtype, device=device)
        result = self.inplace(*others[:self.position], written, *others[self.position:], **kwargs)
        return written if self.position == 0 else (result, written)

    def written(self, results: Any) -> Any:
        """The overwritten operand among the op's results, or among the nodes or values for them."""
        return results if self.position == 0 else results[self.position]


_OVERWRITING: dict[OpOverload, _Overwriting] = {
    _aten.bernoulli.p: _Overwriting(_aten.bernoulli_.float),
    _aten.bernoulli.Tensor: _Overwriting(_aten.bernoulli_.Tensor),
    _aten.normal_functional.default: _Overwriting(_aten.normal_.default),
    _aten.exponential.default: _Overwriting(_aten.exponential_.default),
    _aten.uniform.default: _Overwriting(_aten.uniform_.default),
    _aten.cauchy.default: _Overwriting(_aten.cauchy_.default),
    _aten.log_normal.default: _Overwriting(_aten.log_normal_.default),
    _aten.geometric.default: _Overwriting(_aten.geometric_.default),
    _aten.random.default: _Overwriting(_aten.random_.default),
    getattr(_aten.random, "from"): _Overwriting(getattr(_aten.random_, "from")),
    _aten.random.to: _Overwriting(_aten.random_.to),
    _aten.copy.default: _Overwriting(_aten.copy_.default),
    _aten.fill.Scalar: _Overwriting(_aten.fill_.Scalar),
    _aten.fill.Tensor: _Overwriting(_aten.fill_.Tensor),
    _aten.zero.default: _Overwriting(_aten.zero_.default),
    # Outside of training it does not change the noise.
    _aten.rrelu_with_noise_functional.default: _Overwriting(_aten.rrelu_with_noise.default, 1),
}
_TRAINING = 4
"""Position of the argument `training` of `rrelu_with_noise_functional`."""

_SCATTERS = frozenset({
    _aten.slice_scatter.default, _aten.select_scatter.default, _aten.diagonal_scatter.default,
    _aten.as_strided_scatter.default})
"""Ops that copy their second operand, whatever its layout, into a part of the first."""


def _define(op: OpOverload, rule: _Overwriting) -> OpOverload:
    """The op that makes the result of `op` without the operand that it overwrites."""
    schema = schema_of(rule.inplace)
    name = f"fresh_{schema.name.partition('::')[2].removesuffix('_')}"
    takes, _, gives = str(schema_of(op)).partition("(")[2].rpartition(" -> ")
    others = takes.removesuffix(")").split(", ")
    del others[rule.position]
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    return define_op(name + overload, f"({', '.join((_LAYOUT, *others))}) -> {gives}", rule.run,
                     tags=tuple({torch.Tag.nondeterministic_seeded} & set(op.tags)))


_FRESH: dict[OpOverload, OpOverload] = {op: _define(op, rule) for op, rule in _OVERWRITING.items()}
_RULES = {_FRESH[op]: rule for op, rule in _OVERWRITING.items()}
"""By ops defined here."""
_DESCRIBING = _LAYOUT.count(",") + 1
"""How many of their arguments describe the result."""


def written_in_place(op: OpOverload, args: tuple[Any, ...], out: Any
                     ) -> tuple[OpOverload, tuple[Any, ...]]:
    """The torch op that writes a fresh result, with its arguments; any other op unchanged.  `out`:
    the result."""
    if op not in _RULES:
        return op, args
    rule = _RULES[op]
    others, place = args[_DESCRIBING:], rule.position
    return rule.inplace, (*others[:place], rule.written(out), *others[place:])


def make_results_fresh(joint: JointGraph) -> JointGraph:
    """Replace each op of a clean joint graph that overwrites an operand by its fresh op, and other
    uninitialised memory of the forward by zeros."""
    graph = joint.graph
    for node in graph.nodes:
        if node.target is _aten.copy.default:
            _scatter_source(node)
            _clone(graph, node)
        if node.target in _FRESH and node.users:
            _make_fresh(graph, node)
        if node.target is _aten.native_dropout.default:
            _split_dropout(graph, node)
    eliminate_dead_code(graph)
    joint = joint.described_anew()
    last = last_forward_node(joint)
    for node in graph.nodes:
        if last is None or node is last:
            break
        if (isinstance(node.target, OpOverload) and schema_of(node.target).name in UNINITIALISED
                and _has_own_elements(node.meta["val"])):
            _replace(graph, node, _FRESH[_aten.zero.default], node.meta["val"], node)
    graph.lint()
    return joint


def _scatter_source(copy: fx.Node) -> None:
    """Let ops that only scatter a copy read its source, if that has the same shape and dtype."""
    source, result = copy.args[1], copy.meta["val"]
    if not isinstance(source, fx.Node):
        return
    value = source.meta["val"]
    if (same_sizes(value.shape, result.shape) and value.dtype == result.dtype
            and value.device == result.device
            and all(user.target in _SCATTERS and user.args[1] is copy and user.args[0] is not copy
                    for user in copy.users)):
        copy.replace_all_uses_with(source)


def _clone(graph: fx.Graph, copy: fx.Node) -> None:
    """Replace a copy by a clone of its source, if that gives the same tensor."""
    source, result = copy.args[1], copy.meta["val"]
    value = source.meta["val"] if isinstance(source, fx.Node) else None
    if (isinstance(value, torch.Tensor) and _has_own_elements(value) and _has_own_elements(result)
            and not value.is_conj() and not value.is_neg()
            and (value.shape, value.stride(), value.dtype, value.device) == (
                result.shape, result.stride(), result.dtype, result.device)):
        new = Emitter(graph, copy)(_aten.clone.default, source, like=copy)
        if new.meta["val"].stride() == result.stride():
            copy.replace_all_uses_with(new)


def _make_fresh(graph: fx.Graph, node: fx.Node) -> None:
    rule = _OVERWRITING[node.target]
    if node.target is _aten.rrelu_with_noise_functional.default and not (
            len(node.args) > _TRAINING and node.args[_TRAINING]):
        return
    operand, result = node.args[rule.position], rule.written(node.meta["val"])
    others = (*node.args[:rule.position], *node.args[rule.position + 1:])
    # Random numbers are assigned in the order of the memory that the plain step writes.
    is_random_fill = torch.Tag.nondeterministic_seeded in node.target.tags
    like = operand.meta["val"] if is_random_fill else result
    is_symbolic_fill = is_random_fill and rule.position == 0 and not _is_known(like)
    if is_symbolic_fill or (_has_own_elements(like) and (
            like.stride() == result.stride() or (rule.position == 0 and result.is_contiguous()))):
        _replace(graph, node, _FRESH[node.target], like, operand, others, node.kwargs)


def _split_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a dropout on a CPU by the ops that its kernel calls: then its mask is drawn again
    without its operand, and its result made again without another draw."""
    operand, p, train = node.args
    if not (train and isinstance(p, float) and 0 < p < 1 and all(
            map(is_tuple_element, node.users))):
        return
    mask = node.meta["val"][1]
    if mask.device.type != "cpu" or not (
            _is_known(mask) or same_sizes(mask.stride(), operand.meta["val"].stride())):
        return
    emit = Emitter(graph, node)
    drawn = emit(_FRESH[_aten.bernoulli.p], *_layout(emit, node, mask, operand), 1 - p, like=node)
    kept = emit(_aten.mul.Tensor, operand, drawn, like=node)
    result = emit(_aten.mul.Tensor, kept, 1 / (1 - p), like=node)
    for element in list(node.users):
        element.replace_all_uses_with((result, drawn)[element.args[1]])
        graph.erase_node(element)
    graph.erase_node(node)


def _is_known(tensor: torch.Tensor) -> bool:
    """True if its layout has no symbols."""
    return all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


def _has_own_elements(tensor: torch.Tensor) -> bool:
    """True if sizes are known and no two elements of a tensor share memory."""
    return _is_known(tensor) and not any(
        stride == 0 and size > 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _layout(emit: Emitter, node: fx.Node, tensor: torch.Tensor, operand: fx.Node
            ) -> tuple[Any, ...]:
    """The arguments of a fresh op, in place of `node`, for a result in the layout of a tensor.
    Symbolic numbers are asked of an operand with that layout, until `Sizes.settle` gives them."""
    shape, strides = ([
        number if isinstance(number, int) else emit(query, operand, dimension, like=node)
        for dimension, number in enumerate(numbers)]
        for numbers, query in ((tensor.shape, _aten.sym_size.int),
                               (tensor.stride(), _aten.sym_stride.int)))
    return shape, strides, tensor.dtype, tensor.device


def _replace(graph: fx.Graph, node: fx.Node, target: OpOverload, like: torch.Tensor,
             operand: fx.Node, others: tuple[Any, ...] = (),
             kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Replace a node by a call of a fresh op with the layout of `like`, which `operand` has; its
    readers read the result in the layout that they were traced with."""
    emit = Emitter(graph, node)
    new = emit(target, *_layout(emit, node, like, operand), *others, like=node, **kwargs)
    traced = node.meta["val"]
    if isinstance(traced, torch.Tensor) and not same_sizes(
            new.meta["val"].stride(), traced.stride()):
        new = emit(_aten.clone.default, new, like=node, memory_format=torch.contiguous_format)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    for element in filter(is_tuple_element, new.users):
        element.meta["val"] = new.meta["val"][element.args[1]]
