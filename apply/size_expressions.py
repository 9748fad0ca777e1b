"""Sizes and calls of ops written as text in the names of sizes, and read back.

A plan's file holds such text: `4*batch*length`, or
`aten.bmm.default(tensor(float32, (4*batch, length, 64), (64*length, 64, 1)), ...)`.  Only what
stands here is evaluated: arithmetic of numbers, such as `trunc(0.15*float(length))`, and plain
values.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil": math.ceil, "float": float, "floor": math.floor, "max": max, "min": min, "round": round,
    "trunc": math.trunc}
_LARGEST_POWER, _LARGEST_BASE = 8, 2 ** 63
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values()
           if isinstance(each, torch.dtype)}
_SETTINGS = {str(each): each for each in vars(torch).values()
             if isinstance(each, (torch.layout, torch.memory_format))}
_FLOATS = {"inf": float("inf"), "nan": float("nan")}
MakeTensor = Callable[[torch.dtype, tuple[int, ...], tuple[int, ...]], Any]


@lru_cache(maxsize=4096)
def parsed(text: str) -> ast.expr:
    """The text as an expression; raises `ValueError`."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is no expression: {error}") from None


def number(text: str, values: Mapping[str, int]) -> int:
    """The value of a size where the named sizes have these values; raises `ValueError`."""
    return _size(parsed(text), values, text)


def call(text: str, values: Mapping[str, int], make_tensor: MakeTensor
         ) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The op of a call, and its arguments; raises `ValueError`."""
    node = parsed(text)
    if not isinstance(node, ast.Call):
        raise ValueError(f"{text!r} is no call of an op")
    return (ast.unparse(node.func),
            tuple(_argument(each, values, make_tensor, text) for each in node.args),
            {str(each.arg): _argument(each.value, values, make_tensor, text)
             for each in node.keywords})


def argument(text: str, values: Mapping[str, int], make_tensor: MakeTensor) -> Any:
    """One argument or result; raises `ValueError`."""
    return _argument(parsed(text), values, make_tensor, text)


def written(value: object, size: Callable[[Any], str]) -> str:
    """An argument of an op as text; `size` writes a size.  Raises `ValueError` where it is of
    another kind than those read here."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape, stride = (_tuple([size(each) for each in part])
                         for part in (value.shape, value.stride()))
        return f"tensor({dtype}, {shape}, {stride})"
    if isinstance(value, torch.SymInt):
        return size(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "None"  # that of the plan
    if isinstance(value, (tuple, list)):
        inner = [written(each, size) for each in value]
        return f"[{', '.join(inner)}]" if isinstance(value, list) else _tuple(inner)
    if isinstance(value, (torch.layout, torch.memory_format)):
        return repr(str(value))
    raise ValueError(f"a {type(value).__name__} cannot be written")


def _tuple(parts: Sequence[str]) -> str:
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _size(node: ast.expr, values: Mapping[str, int], text: str) -> int:
    found = _value(node, values, text)
    if not isinstance(found, int) or isinstance(found, bool):
        raise ValueError(f"{text!r} is no whole number")
    return found


def _value(node: ast.expr, values: Mapping[str, int], text: str) -> Any:
    match node:
        case ast.Constant(int() | float() as found) if not isinstance(found, bool):
            return found
        case ast.Name(name) if name in values:
            return values[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, values, text)
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            operands = _value(left, values, text), _value(right, values, text)
            if isinstance(kind, ast.Pow) and not (
                    0 <= operands[1] <= _LARGEST_POWER and abs(operands[0]) <= _LARGEST_BASE):
                raise ValueError(f"{text!r} has a power of {operands[1]}, or of a number above "
                                 f"{_LARGEST_BASE}")
            return _applied(_OPERATORS[type(kind)], operands, text)
        case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
            return _applied(_FUNCTIONS[name],
                            [_value(each, values, text) for each in arguments], text)
    raise ValueError(f"{text!r} has {ast.unparse(node)!r}, which is no arithmetic of the sizes "
                     f"{', '.join(values)}")


def _applied(function: Callable[..., Any], operands: Sequence[Any], text: str) -> Any:
    try:
        return function(*operands)
    except ZeroDivisionError:
        raise ValueError(f"{text!r} divides by 0") from None
    except (OverflowError, TypeError) as error:
        raise ValueError(f"{text!r} has no value: {error}") from None


def _argument(node: ast.expr, values: Mapping[str, int], make_tensor: MakeTensor, text: str) -> Any:
    match node:
        case ast.Constant(found):
            return _SETTINGS.get(found, found) if isinstance(found, str) else found
        case ast.UnaryOp(ast.USub(), ast.Constant(float() as found)):
            return -found
        case ast.Name(name) if name in _DTYPES and name not in values:
            return _DTYPES[name]
        case ast.Name(name) if name in _FLOATS and name not in values:
            return _FLOATS[name]
        case ast.UnaryOp(ast.USub(), ast.Name(name)) if name in _FLOATS and name not in values:
            return -_FLOATS[name]
        case ast.Call(ast.Name("tensor"), [ast.Name(dtype), ast.Tuple(shape), ast.Tuple(stride)],
                      []) if dtype in _DTYPES and len(shape) == len(stride):
            sizes = [tuple(_size(each, values, text) for each in part)
                     for part in (shape, stride)]
            return make_tensor(_DTYPES[dtype], *sizes)
        case ast.List(inner):
            return [_argument(each, values, make_tensor, text) for each in inner]
        case ast.Tuple(inner):
            return tuple(_argument(each, values, make_tensor, text) for each in inner)
    return _value(node, values, text)
