"""Private names of torch that symbolic sizes need."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Max
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.symbol import SymT, symbol_is_type


def expression_of(size: Any) -> Any:
    """The sympy expression of a size, a plain number for a plain number."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_float(symbol: Any) -> bool:
    """True for the symbol of a float."""
    return bool(symbol_is_type(symbol, SymT.FLOAT))


def same_sizes(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """True where sizes are equal whatever the symbols' values are; torch's own comparison would fix
    a symbol whose value happens to be the other size."""
    return len(mine) == len(theirs) and all(
        _are_equal(expression_of(left), expression_of(right))
        for left, right in zip(mine, theirs, strict=True))


@lru_cache(maxsize=4096)
def _are_equal(left: Any, right: Any) -> bool:
    """True if two expressions are one polynomial of symbols and of quotients of them; no tensor is
    taken to be empty, for which torch has strides of at least 1."""
    return bool(left == right) or sympy.expand(_not_empty(left) - _not_empty(right)) == 0


def _not_empty(expression: Any) -> Any:
    """An expression with a size in place of the larger of it and 1."""
    return sympy.sympify(expression).replace(
        lambda each: isinstance(each, Max) and len(each.args) == 2 and 1 in each.args,
        lambda each: next(size for size in each.args if size != 1))


def function_of(expression: Any, symbols: Sequence[Any]) -> Callable[..., int]:
    """A function of the symbols' values, in order; raises `ValueError` where the expression has
    another symbol."""
    others: set[Any] = getattr(expression, "free_symbols", set()) - set(symbols)
    if others:
        raise ValueError(f"{expression} depends on {', '.join(sorted(map(str, others)))}, which "
                         "no input of the graph gives")
    text = PythonPrinter().doprint(expression) if not isinstance(expression, int) else expression
    scope: dict[str, Any] = {"math": math, "torch": torch}
    # An input may also be given as an expression of the symbols, which is not read.
    names = [str(each) if each.is_Symbol else f"_{number}" for number, each in enumerate(symbols)]
    exec(f"def size_of({', '.join(names)}):\n    return {text}", scope)
    function: Callable[..., int] = scope["size_of"]
    function.__module__ = __name__
    return function


def text_of(size: Any, names: Mapping[Any, str]) -> str:
    """A size as text in which each symbol has this name; raises `ValueError` where a symbol has
    none."""
    expression = expression_of(size)
    symbols: set[Any] = getattr(expression, "free_symbols", set())
    if unnamed := sorted(str(each) for each in symbols if each not in names):
        raise ValueError(f"{expression} depends on {', '.join(unnamed)}, which is no named size")
    if not symbols:
        return str(int(expression))
    named = {each: type(each)(names[each], positive=True, integer=True) for each in symbols}
    found = expression.xreplace(named).replace(CeilToInt, _rounded_up)
    # What is rounded is not written in another way, which may round to something else.
    forms = (found,) if found.atoms(sympy.Float) else (found, found.expand())
    text = min(map(PythonPrinter().doprint, forms), key=len)
    return text.replace("math.", "").replace("torch.sym_float(", "float(")


def _rounded_up(ratio: Any) -> Any:
    """A ratio of whole numbers rounded up, as attention's kernels on a GPU pad a length, in whole
    numbers."""
    return (-FloorDiv(-ratio.args[0], ratio.args[1]) if isinstance(ratio, IntTrueDiv)
            else CeilToInt(ratio))


def _symbolic_sizes(inputs: Sequence[object]) -> list[torch.SymInt]:
    """Symbolic sizes that a graph under compilation is called with."""
    sizes = [size for each in inputs for size in (
        each.shape if isinstance(each, torch.Tensor) else [each])]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def take_equal_sizes_for_one(inputs: Sequence[object]) -> None:
    """Let symbolic sizes that are equal in this call be so in every call of the graph that is being
    compiled, as they are in a graph with fixed sizes; others compile another one."""
    first: dict[int, torch.SymInt] = {}
    for size in _symbolic_sizes(inputs):
        bool(first.setdefault(size_now(size), size) == size)  # torch notes the comparison


def extents_of_whole(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The dimensions of a tensor from the innermost to the outermost one, each with the size that
    it has in the tensor of which this one is a slice; of the outermost, with its own size."""
    strides = [size_now(stride) for stride in tensor.stride()]
    order = sorted(range(len(strides)), key=strides.__getitem__)
    extents = [strides[outer] // max(1, strides[inner])
               for inner, outer in itertools.pairwise(order)]
    return list(zip(order, [*extents, *(size_now(tensor.size(place)) for place in order[-1:])],
                    strict=True))


def places_in_storage(tensors: Collection[torch.Tensor]) -> dict[Any, Any]:
    """Symbols that only say where in its storage a tensor lies, strides and offsets, as expressions
    in its sizes: those of a slice that leaves out as many elements in any call, as `ids[:, :-1]`
    does."""
    found: dict[Any, Any] = {}
    for tensor in tensors:
        for (inner, extent), (outer, _) in itertools.pairwise(extents_of_whole(tensor)):
            stride, step = expression_of(tensor.stride()[outer]), tensor.stride()[inner]
            if getattr(stride, "is_symbol", False) and size_now(step):
                size = tensor.size(inner)
                found[stride] = sympy.sympify(expression_of(step) * (
                    expression_of(size) + extent - size_now(size))).xreplace(found)
        offset = expression_of(tensor.storage_offset())
        if getattr(offset, "is_symbol", False):
            found[offset] = sympy.Integer(size_now(tensor.storage_offset()))
    sizes = {symbol for tensor in tensors for size in tensor.shape
             for symbol in getattr(expression_of(size), "free_symbols", ())}
    return {symbol: place for symbol, place in found.items() if symbol not in sizes}


def fix_sizes(inputs: Sequence[object]) -> None:
    """Let the graph that is being compiled be for these sizes alone."""
    for size in _symbolic_sizes(inputs):
        int(size)  # torch notes that the number was asked for


def size_now(size: torch.SymInt | int) -> int:
    """A size in the call that a graph is compiled for."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def smallest_value(size: torch.SymInt) -> int:
    """The smallest value of a symbol that the graph's guards allow."""
    node: Any = size.node
    return int(node.shape_env.var_to_range[node.expr].lower)


def guards_hold(size: torch.SymInt, values: Mapping[Any, int], places: Mapping[Any, Any]) -> bool:
    """True if what torch found when it compared sizes, in the graph of this one, holds where the
    symbols have these values.  `places`: see `places_in_storage`."""
    node: Any = size.node
    env = node.shape_env
    numbers = {symbol: sympy.Integer(value) for symbol, value in values.items()}
    numbers |= {symbol: place.xreplace(numbers) for symbol, place in places.items()}
    return all(env.var_to_range[symbol].lower <= number <= env.var_to_range[symbol].upper
               for symbol, number in numbers.items()) and all(
                   env.replace(guard.expr).xreplace(numbers) == sympy.true
                   for guard in env.guards)


_MARKS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
_WEAK_MARKS = _MARKS[1]


def marked_dimensions(tensor: torch.Tensor) -> set[int]:
    """Dimensions that the user has marked as symbolic (`torch._dynamo.mark_dynamic`)."""
    return {int(place) for mark in _MARKS for place in getattr(tensor, mark, ())}


@contextlib.contextmanager
def symbolic_dimensions(dimensions: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> Iterator[None]:
    """Inside, torch.compile takes these dimensions of tensors for symbolic, where the code does not
    need one size."""
    marked = []
    for tensor, indices in dimensions:
        if indices and not hasattr(tensor, _WEAK_MARKS):
            torch._dynamo.maybe_mark_dynamic(tensor, list(indices))
            marked.append(tensor)
    try:
        yield
    finally:
        for tensor in marked:
            for mark in (_WEAK_MARKS, "_has_dynamo_dim_marking"):
                if hasattr(tensor, mark):
                    delattr(tensor, mark)


def backward_keeps_graph() -> bool:
    """True in a backward with `retain_graph=True`, which may come again."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements lie side by side, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True),
                               key=lambda pair: (size_now(pair[0]), size_now(pair[1]))):
        if size_now(size) == 1:
            continue
        if not same_sizes([stride], [expected]):
            return False
        expected *= size
    return True
