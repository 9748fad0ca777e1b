"""The action of an op on rows: the operands that are cut into chunks if its result is.

The model of the world: *rows* are some adjacent dimensions of a tensor, taken together (batch and
sequence; in attention the queries, of which each sequence and head has as many).  An op acts on
rows if a chunk of its result needs only the same chunk of some operands and all of the others; or
if its result is a sum over rows, to which each chunk adds.  A chunk of a tensor keeps its number of
dimensions: all dimensions of the rows but the last become 1.

Blind spots: an op without a rule here ends the part; random ops have none, since in chunks they
would draw other numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any

import torch
from torch import fx

from planner._graph_capture.joint_graph.replay import is_random
from planner._graph_capture.torch_compat import OpOverload

_aten = torch.ops.aten

CASTS = frozenset({_aten._to_copy.default, torch.ops.prims.convert_element_type.default})
"""Ops that convert to another dtype, as captured and as Inductor decomposes them."""
ADDING = {_aten.mm.default: _aten.addmm.default, _aten.bmm.default: _aten.baddbmm.default}
"""Products of matrices and of batched matrices -> the same products with a summand."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The dimensions of a tensor that are its rows."""

    start: int
    stop: int

    def count(self, shape: Sequence[int]) -> int:
        """Number of rows of a tensor."""
        return math.prod(shape[self.start:self.stop])

    def chunk(self, shape: Sequence[int], rows: int) -> list[int]:
        """The shape of a chunk with so many rows."""
        return [*shape[:self.start], *[1] * (self.stop - self.start - 1), rows, *shape[self.stop:]]


class Kind(Enum):
    """Layout of a value that has no rows."""

    WHOLE = auto()
    """Each chunk needs the whole value."""
    SUM = auto()
    """The results of the chunks add up to the value."""


Layout = Rows | Kind
Known = Callable[[fx.Node], Layout | None]
"""The layout of an operand that is in the part; `None` for any other."""


@dataclass(frozen=True, slots=True)
class Action:
    """The action of one op on rows."""

    operands: Mapping[fx.Node, Layout]
    results: tuple[Layout, ...]
    """One for each result of an op."""
    shape_argument: int | None = None
    """Position of the argument that is the shape of the result."""


Rule = Callable[[fx.Node, Known], Action | None]
"""The action of a call of an op on rows."""


class Reduction(IntEnum):
    """The reductions of losses, with the numbers that their ops use."""

    NONE = 0
    MEAN = 1
    SUM = 2


def action_of(node: fx.Node, known: Known) -> Action | None:
    """The action of `node` on rows, given the layouts of some operands; `None` if it has none."""
    if node.target is operator.getitem:
        return None  # its layout comes from the action of its op
    if not isinstance(node.target, OpOverload) or is_random(node):
        return None
    if any(known(operand) is Kind.SUM for operand in node.all_input_nodes):
        return _of_sum(node, known)
    rule = _RULES.get(node.target)
    if rule is not None:
        return rule(node, known)
    if torch.Tag.pointwise in node.target.tags and isinstance(node.meta.get("val"), torch.Tensor):
        return _pointwise(node, known)
    return None


def _of_sum(node: fx.Node, known: Known) -> Action | None:
    """Views and casts of a sum are sums of views and casts."""
    if len(node.all_input_nodes) != 1 or node.target not in _OF_SUMS:
        return None
    return Action({node.all_input_nodes[0]: Kind.SUM}, (Kind.SUM,))


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _rows(node: fx.Node, known: Known) -> Rows | None:
    found = known(node)
    return found if isinstance(found, Rows) else None


def _pointwise(node: fx.Node, known: Known) -> Action | None:
    result = _shape(node)
    found: Rows | None = None
    for operand in node.all_input_nodes:
        rows = _rows(operand, known)
        if rows is None:
            continue
        shape = _shape(operand)
        offset = len(result) - len(shape)
        aligned = Rows(rows.start + offset, rows.stop + offset)
        if rows.count(shape) != aligned.count(result) or found not in (None, aligned):
            return None
        found = aligned
    return None if found is None else _broadcasting(node, found, known)


def pointwise_within(node: fx.Node, rows: Rows) -> Action | None:
    """The action of an op that depends on nothing in the part, if it is pointwise, on these rows of
    its result."""
    if (not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags
            or is_random(node)):
        return None
    return _broadcasting(node, rows, lambda operand: None)


def _broadcasting(node: fx.Node, rows: Rows, known: Known) -> Action | None:
    """The action of a pointwise op on these rows of its result."""
    operands: dict[fx.Node, Layout] = {}
    for operand in node.all_input_nodes:
        layout = _broadcast(operand, rows, _shape(node))
        if layout is None or (layout is Kind.WHOLE and known(operand) is not None):
            return None
        operands[operand] = layout
    return Action(operands, (rows,)) if operands else None


def _broadcast(operand: fx.Node, rows: Rows, result: Sequence[int]) -> Layout | None:
    """The layout of an operand that is broadcast to a result with these rows."""
    value = operand.meta["val"]
    if not isinstance(value, torch.Tensor):
        return None
    offset = len(result) - value.ndim
    there = Rows(max(rows.start - offset, 0), max(rows.stop - offset, 0))
    count = there.count(value.shape)
    if count == rows.count(result):
        return there
    return Kind.WHOLE if count == 1 else None


def _on_rows(rule: Callable[[fx.Node, fx.Node, Rows], Action | None]) -> Rule:
    """A rule for an op of one tensor that has rows."""

    def applied(node: fx.Node, known: Known) -> Action | None:
        source = node.all_input_nodes[0]
        rows = _rows(source, known)
        return None if rows is None else rule(node, source, rows)

    return applied


@_on_rows
def _view(node: fx.Node, source: fx.Node, rows: Rows) -> Action | None:
    shape, result = _shape(source), _shape(node)
    before, count = math.prod(shape[:rows.start]), rows.count(shape)
    for start in range(len(result)):
        if rows.start and result[start] == 1:
            continue  # dimensions of size 1 stay in front of the rows
        for stop in range(start + 1, len(result) + 1):
            if math.prod(result[:start]) == before and math.prod(result[start:stop]) == count:
                return Action({source: rows}, (Rows(start, stop),), shape_argument=1)
    return None


@_on_rows
def _expand(node: fx.Node, source: fx.Node, rows: Rows) -> Action | None:
    shape, result = _shape(source), _shape(node)
    offset = len(result) - len(shape)
    there = Rows(rows.start + offset, rows.stop + offset)
    if there.count(result) != rows.count(shape):
        return None
    return Action({source: rows}, (there,), shape_argument=1)


@_on_rows
def _permute(node: fx.Node, source: fx.Node, rows: Rows) -> Action | None:
    dimensions = list(range(len(_shape(source))))
    if node.target is _aten.permute.default:
        dimensions = [int(d) % len(dimensions) for d in node.args[1]]
    elif node.target is _aten.t.default:
        dimensions.reverse()
    else:
        first, second = (int(d) % len(dimensions) for d in node.args[1:3])
        dimensions[first], dimensions[second] = dimensions[second], dimensions[first]
    start = dimensions.index(rows.start)
    if dimensions[start:start + rows.stop - rows.start] != list(range(rows.start, rows.stop)):
        return None
    return Action({source: rows}, (Rows(start, start + rows.stop - rows.start),))


@_on_rows
def _unsqueeze(node: fx.Node, source: fx.Node, rows: Rows) -> Action | None:
    position = int(node.args[1]) % (len(_shape(source)) + 1)
    if rows.start < position < rows.stop:
        return None
    moved = 1 if position <= rows.start else 0
    return Action({source: rows}, (Rows(rows.start + moved, rows.stop + moved),))


@_on_rows
def _squeeze(node: fx.Node, source: fx.Node, rows: Rows) -> Action | None:
    position = int(node.args[1]) % len(_shape(source))
    if rows.start <= position < rows.stop or _shape(source)[position] != 1:
        return None
    moved = 1 if position < rows.start else 0
    return Action({source: rows}, (Rows(rows.start - moved, rows.stop - moved),))


def _along(position: int, tensors: Sequence[int] = (0,)) -> Rule:
    """A rule for ops along one dimension, the argument at `position`, that keep the shape; rows are
    among the other dimensions."""

    def rule(node: fx.Node, known: Known) -> Action | None:
        given = [node.args[index] for index in tensors]
        rows = next((r for r in (_rows(arg, known) for arg in given) if r is not None), None)
        if rows is None or rows.start <= int(node.args[position]) % len(_shape(node)) < rows.stop:
            return None
        return _alike(node, given, rows, known)

    return rule


def _alike(node: fx.Node, tensors: Sequence[fx.Node], rows: Rows, known: Known
           ) -> Action | None:
    """The action of an op whose operands and result have the same rows."""
    count = rows.count(_shape(tensors[0]))
    for tensor in tensors:
        if known(tensor) not in (None, rows) or rows.count(_shape(tensor)) != count:
            return None
    others = [other for other in node.all_input_nodes if other not in tensors]
    if any(known(other) is not None for other in others):
        return None
    return Action({**dict.fromkeys(tensors, rows), **dict.fromkeys(others, Kind.WHOLE)}, (rows,))


@_on_rows
def _reduction(node: fx.Node, source: fx.Node, rows: Rows) -> Action | None:
    """Reductions over given dimensions: within each row, or over all rows."""
    rank = len(_shape(source))
    given = node.args[1] if len(node.args) > 1 and node.args[1] is not None else range(rank)
    dimensions = {int(d) % rank for d in ([given] if isinstance(given, int) else given)
                  } or set(range(rank))
    keeps = bool(node.args[2]) if len(node.args) > 2 else False
    ours = set(range(rows.start, rows.stop))
    if ours <= dimensions:
        is_sum = node.target is _aten.sum.dim_IntList
        return Action({source: rows}, (Kind.SUM,)) if is_sum else None
    if ours & dimensions:
        return None
    gone = 0 if keeps else sum(d < rows.start for d in dimensions)
    return Action({source: rows}, (Rows(rows.start - gone, rows.stop - gone),))


@_on_rows
def _total(node: fx.Node, source: fx.Node, rows: Rows) -> Action | None:
    return Action({source: rows}, (Kind.SUM,))


def factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two matrices, or batches of them, that a product multiplies."""
    left, right = node.args[:2] if node.target in ADDING else node.args[1:3]
    return left, right


def by_rows(node: fx.Node) -> Action | None:
    """The action of a matrix product on the rows of its left operand."""
    left = factors(node)[0]
    dimension = len(_shape(node)) - 2
    return action_of(node, {left: Rows(dimension, dimension + 1)}.get)


def _mm(node: fx.Node, known: Known) -> Action | None:
    left, right = factors(node)
    mine, theirs = known(left), known(right)
    bias = () if node.target is _aten.mm.default else (node.args[0],)
    if any(known(b) is not None or len(_shape(b)) != 1 for b in bias):
        return None
    whole: dict[fx.Node, Layout] = dict.fromkeys(bias, Kind.WHOLE)
    if mine == Rows(0, 1) and theirs is None:
        return Action({**whole, left: Rows(0, 1), right: Kind.WHOLE}, (Rows(0, 1),))
    if bias or left is right:
        return None
    if theirs == Rows(1, 2) and mine is None:
        return Action({left: Kind.WHOLE, right: Rows(1, 2)}, (Rows(1, 2),))
    if (mine == Rows(1, 2) and theirs in (None, Rows(0, 1))) or (
            mine is None and theirs == Rows(0, 1)):
        return Action({left: Rows(1, 2), right: Rows(0, 1)}, (Kind.SUM,))
    return None


def _bmm(node: fx.Node, known: Known) -> Action | None:
    """A batched product, cut by matrices, by rows of the left or columns of the right operand, or
    as a sum over the contracted dimension."""
    left, right = factors(node)
    if known(left) is known(right) is None:
        return None
    for of_left, of_right, of_result in _BATCHED:
        if known(left) not in (None, of_left) or known(right) not in (None, of_right):
            continue
        operands: dict[fx.Node, Layout] = {left: of_left, right: of_right}
        if node.target in ADDING:
            return Action(operands, (of_result,))
        added = (_broadcast(node.args[0], of_result, _shape(node))
                 if isinstance(of_result, Rows) else None)
        if added is not None and known(node.args[0]) in (None, added):
            return Action({**operands, node.args[0]: added}, (of_result,))
    return None


def _nll_loss(node: fx.Node, known: Known) -> Action | None:
    """The loss of a matrix of log-probabilities: summed, not averaged (see `chunked`)."""
    backward = node.target is _aten.nll_loss_backward.default
    gradient, (scores, target, weight, reduction) = (
        (node.args[0], node.args[1:5]) if backward else (None, node.args[:4]))
    if known(scores) != Rows(0, 1) or known(target) is not None or reduction == Reduction.MEAN:
        return None
    if any(known(other) is not None for other in (weight,) if other is not None):
        return None
    operands: dict[fx.Node, Layout] = {scores: Rows(0, 1), target: Rows(0, 1)}
    if weight is not None:
        operands[weight] = Kind.WHOLE
    if not backward:
        return Action(operands, (Rows(0, 1) if reduction == Reduction.NONE else Kind.SUM, Kind.SUM))
    for other in (gradient, node.args[6]):
        if known(other) is not None:
            return None
        operands[other] = Kind.WHOLE
    if reduction == Reduction.NONE:
        operands[gradient] = Rows(0, 1)
    return Action(operands, (Rows(0, 1),))


_BATCHED: tuple[tuple[Layout, Layout, Layout], ...] = (
    (Rows(0, 1), Rows(0, 1), Rows(0, 1)), (Rows(1, 2), Kind.WHOLE, Rows(1, 2)),
    (Kind.WHOLE, Rows(2, 3), Rows(2, 3)), (Rows(2, 3), Rows(1, 2), Kind.SUM))
"""The layouts of the left and the right operand and of the result of batched products."""
_OF_SUMS = CASTS | {_aten.t.default, _aten.permute.default, _aten.transpose.int,
                    _aten.view.default, _aten._unsafe_view.default}

_RULES: dict[Any, Rule] = {
    **dict.fromkeys((_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default), _view),
    _aten.expand.default: _expand,
    **dict.fromkeys((_aten.permute.default, _aten.t.default, _aten.transpose.int), _permute),
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _squeeze,
    **dict.fromkeys((*CASTS, _aten.clone.default, _aten.detach.default,
                     _aten.alias.default, _aten.zeros_like.default, _aten.ones_like.default,
                     _aten.full_like.default, _aten.empty_like.default), _pointwise),
    **dict.fromkeys((_aten._log_softmax.default, _aten._softmax.default,
                     _aten._safe_softmax.default), _along(1)),
    **dict.fromkeys((_aten._log_softmax_backward_data.default,
                     _aten._softmax_backward_data.default), _along(2, tensors=(0, 1))),
    _aten.gather.default: _along(1, tensors=(0, 2)),
    _aten.scatter.value: _along(1, tensors=(0, 2)),
    **dict.fromkeys((_aten.scatter.src, _aten.scatter_add.default), _along(1, tensors=(0, 2, 3))),
    **dict.fromkeys((_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default,
                     _aten.amin.default, _aten.logsumexp.default), _reduction),
    _aten.sum.default: _total,
    **dict.fromkeys((_aten.mm.default, _aten.addmm.default), _mm),
    **dict.fromkeys((_aten.bmm.default, _aten.baddbmm.default), _bmm),
    **dict.fromkeys((_aten.nll_loss_forward.default, _aten.nll_loss_backward.default), _nll_loss),
}
