"""The tensor values that a model's code asks for, learned by calling it.

Code that branches on a value (`if x.sum() > 0`), logs one (`x.max().item()`), or selects by values
(`x[x > 0]`, `nonzero`) cannot be traced without data.  One call without gradients, which needs
little memory, gives the values and the sizes of selections.  What the call changes is put back, so
that the next one asks for the same values.

Blind spots: those of `graph_capture.model_state` and `graph_capture.outside_state`; values read
without the dispatcher (`numpy`, the `tolist` of more than 1,000) are not seen, and are 0 in the
capture unless the tensor is an input of integers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner._graph_capture.errors import DataDependentValue
from planner._graph_capture.fake_copies.fake import listed_by_items
from planner._graph_capture.fake_copies.storage_less import (
    VALUE_OPS,
    Answer,
    assigns_by_mask,
    makes_size_by_values,
)
from planner._graph_capture.model_state import ModelState
from planner._graph_capture.outside_state import OutsideState
from planner._graph_capture.torch_compat import (
    NoStaticShape,
    Place,
    TorchDispatchMode,
    UnsupportedOperatorException,
    pytree,
    schema_of,
    written_tensors,
)
from planner._graph_capture.user_code import place_of


def data_dependent_value(error: BaseException) -> DataDependentValue:
    """The error for code that asks for a value unknown during capture, where `error` was raised."""
    what = "the model's code " + (
        f"makes a tensor whose size depends on values ({error})"
        if isinstance(error, NoStaticShape[:1]) else "asks for the value of a tensor"
    ) + place_of(error)
    asked = DataDependentValue(
        f"{what}, and a step that is captured without being run "
        "has no values. Either train with planner.within(model, budget), which plans the regions "
        "that lie between; or give each region a budget of its own with torch.compile(model, "
        'backend="checkpoint_planner"); or decide by shapes and arguments, or with torch.where, '
        "and take logged values from what the model returns")
    asked.what = what
    return asked


def failure(error: BaseException) -> str:
    """The error with its type; for an op without a fake kernel, instructions to register one."""
    if isinstance(error, UnsupportedOperatorException):
        name = schema_of(error.func).name
        return (f"{name} has no fake kernel, which says what shapes its results have: "
                f'register one with @torch.library.register_fake("{name}")')
    return f"{type(error).__name__}: {error}"


def data_dependent_values(model: nn.Module, call: Callable[[], object]) -> tuple[Answer, ...]:
    """The values that `call`, which calls the model, asks for, in order.  A result whose size
    depends on values is a meta tensor."""
    state = ModelState(model)
    outside = OutsideState(model, with_attributes=True, holds_tensors=True)
    recorder = ValueRecorder(state.note_writes)
    try:
        with torch.no_grad(), listed_by_items(), recorder:
            call()
    finally:
        state.restore()
        outside.put_back()
    return tuple(recorder.values)


_ROOM = 0.25
"""By how much more than the most seen so far is captured of a selection that varies."""


def with_larger_selections(answers: tuple[Answer, ...], earlier: Iterable[tuple[Answer, ...]]
                           ) -> tuple[Answer, ...] | None:
    """Answers that serve other calls, too: each size that differed from that of an `earlier` call
    is the largest of them and a quarter more.  `None` if none differed."""
    kinds = [answer.op for answer in answers]
    like = [other for other in earlier if [answer.op for answer in other] == kinds]
    found = tuple(_larger_selection(alike) for alike in zip(answers, *like, strict=True))
    return None if all(map(operator.is_, found, answers)) else found


def _larger_selection(alike: Sequence[Answer]) -> Answer:
    """The first of several calls' answers, with the largest size."""
    answer = alike[0]
    leaves, structure = pytree.tree_flatten(answer.value)
    seen = [pytree.tree_leaves(other.value) for other in alike]
    if answer.op in VALUE_OPS or len({*map(len, seen)}) > 1:
        return answer
    most = max(each.most_selected for each in alike)

    def larger(sizes: set[int]) -> int:
        largest = max(sizes)
        return largest if len(sizes) == 1 else max(
            largest, min(most, math.ceil((1 + _ROOM) * largest)))

    sizes = [tuple(larger({*of_dim}) for of_dim in zip(*(leaf.shape for leaf in of_leaf),
                                                       strict=True))
             for of_leaf in zip(*seen, strict=True)]
    if sizes == [tuple(leaf.shape) for leaf in leaves]:
        return answer
    made = [_of_size(leaf, size) for leaf, size in zip(leaves, sizes, strict=True)]
    return replace(answer, value=pytree.tree_unflatten(made, structure), operands=(
        answer.operands if len({each.operands for each in alike}) == 1 else None))


def _of_size(leaf: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """A dense meta tensor with its dimensions in the order in memory that those of `leaf` have."""
    order = sorted(range(leaf.dim()), key=leaf.stride, reverse=True)
    made = torch.empty([size[dim] for dim in order], dtype=leaf.dtype, device="meta")
    return made.permute([order.index(dim) for dim in range(leaf.dim())])


def decides_by_values(answers: tuple[Answer, ...] | None) -> bool:
    """True if code has asked for values, none of which is a tensor's size: control flow depends on
    them."""
    return bool(answers) and all(answer.op in VALUE_OPS for answer in answers or ())


class ValueRecorder(TorchDispatchMode):
    """Records the values that code asks for, in order."""

    supports_higher_order_operators = True

    def __init__(self, note_writes: Callable[[Iterable[torch.Tensor]], None] | None = None
                 ) -> None:
        """`note_writes`: called with the tensors that an op writes, before it does."""
        super().__init__()
        self.values: list[Answer] = []
        self._note_writes = note_writes

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if self._note_writes is not None:
            self._note_writes(written_tensors(func, args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in VALUE_OPS:
            self.values.append(Answer.of(func, args, out))
        elif makes_size_by_values(func, args):
            self.values.append(Answer.of(func, args, on_meta(out)))
        elif assigns_by_mask(func, args):
            selected = torch.ops.aten.index.Tensor(out, args[1])
            self.values.append(Answer.of(func, args, on_meta(selected)))
        return out


def on_meta(tree: Any) -> Any:
    """The tree with strided tensors on the meta device; the same tensor for the same one."""
    made: dict[int, torch.Tensor] = {}

    def bare(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype,
                                                 device="meta")
        return made[id(leaf)]

    return pytree.tree_map(bare, tree)


class UnknownNumber:
    """A number that code has not computed with yet; if it does, `DataDependentValue` is raised."""

    def _asked(self, *_: Any) -> Any:
        raise DataDependentValue("the model's code computes with a number that it has kept")

    __abs__ = __add__ = __bool__ = __complex__ = __divmod__ = __eq__ = __float__ = _asked
    __floordiv__ = __format__ = __ge__ = __gt__ = __hash__ = __index__ = __int__ = _asked
    __le__ = __lt__ = __mod__ = __mul__ = __ne__ = __neg__ = __pos__ = __pow__ = _asked
    __radd__ = __rdivmod__ = __rfloordiv__ = __rmod__ = __rmul__ = __round__ = _asked
    __rpow__ = __rsub__ = __rtruediv__ = __str__ = __sub__ = __truediv__ = __trunc__ = _asked


def number_without_data(mode: object, tensor: torch.Tensor, place: Place) -> Any:
    """What stands for the number of a tensor without data: as a `mode` with values knows it."""
    known = getattr(mode, "number_at", lambda place: None)(place)
    return UnknownNumber() if known is None else known
