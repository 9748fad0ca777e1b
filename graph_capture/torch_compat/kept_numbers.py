"""Numbers that a model's code takes of tensors (`item`), and only keeps, read behind the graph.

The model of the world: layers note numbers for a log, in an attribute, a dict or a list.  Under
torch.compile the graph breaks where the number is taken, and what follows is compiled again for
each other number, or length of the list.  Here the graph returns the tensor, and the code that
Dynamo makes takes the number of it when the frame returns.  A frame that does anything else with a
number, or in which the graph breaks for another reason, is traced again and takes its numbers
at once.

Blind spots: lists that hold tensors, or that the frame also reads, are followed as by
torch.compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import create_call_function, create_instruction
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker

Place = tuple[str, int]
"""File and line of code."""
COMPUTING = ("BINARY_", "COMPARE_", "CONTAINS_", "GET_ITER", "IS_", "UNARY_")
"""How the names of bytecodes begin that compute with what lies on the stack."""
_LEFT_ALONE = (isinstance, setattr)

_number_of: ContextVar[Callable[[torch.Tensor, Place], Any]] = ContextVar(
    "number_of", default=lambda tensor, place: tensor.item())


@contextlib.contextmanager
def read_by(number_of: Callable[[torch.Tensor, Place], Any]) -> Iterator[None]:
    """Inside, `number_of` gives the number of a tensor which code at a place keeps."""
    token = _number_of.set(number_of)
    try:
        yield
    finally:
        _number_of.reset(token)


@torch.compiler.disable
def read_number(tensor: torch.Tensor, *place: Any) -> Any:
    """The number of a tensor which code at a place keeps; called by code that Dynamo makes."""
    return _number_of.get()(tensor, place)


class _KeptNumber(VariableTracker):
    """The number in a tensor of the graph, which is read when the frame returns."""

    def __init__(self, tensor: Any, log: Any, place: Place, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tensor, self.log, self.place = tensor, log, place

    def python_type(self) -> type:
        dtype = self.tensor.dtype
        return (float if dtype.is_floating_point else complex if dtype.is_complex
                else bool if dtype == torch.bool else int)

    def reconstruct(self, codegen: Any) -> None:
        # Else the code behind a break is compiled for each number; a caller may compute with it.
        returned: list[VariableTracker] = []
        VariableTracker.visit(returned.append, codegen.tx.stack)
        if self in returned or not codegen.tx.current_instruction.opname.startswith("RETURN"):
            self.read_at_once()
        codegen.add_push_null(lambda: codegen.load_import_from(__name__, "read_number"))
        codegen(self.tensor)
        for value in self.place:
            codegen(ConstantVariable.create(value))
        codegen.extend_output(create_call_function(1 + len(self.place), False))

    def read_at_once(self, *_: Any, **__: Any) -> Any:
        """Trace the frame again without such numbers."""
        self.log._reads_at_once = True
        raise UnspecializeRestartAnalysis(restart_reason="code computes with a tensor's number")

    as_proxy = var_getattr = call_method = call_function = read_at_once


def may_keep_number(translator: Any, tensor: TensorVariable) -> bool:
    """True unless the number in a traced tensor is to be read at once."""
    example = tensor.as_proxy().node.meta.get("example_value")
    return (isinstance(example, torch.Tensor) and not example.dim() and _is_outermost(translator)
            and not getattr(translator.speculation_log, "_reads_at_once", False))


def kept_number(translator: Any, tensor: TensorVariable) -> VariableTracker:
    """The number in a traced tensor, until code does more than to keep it."""
    # Another tensor, since code may write to this one.
    copied = tensor.call_method(translator, "detach", [], {}).call_method(
        translator, "clone", [], {})
    frame = translator.frame_summary()
    return _KeptNumber(copied, translator.speculation_log, (frame.filename, frame.lineno))


def _is_outermost(translator: Any) -> bool:
    """True if what is traced is no function of a graph's."""
    return translator.output.current_tracer is translator.output.root_tracer


def read_at_once(values: Iterable[Any]) -> None:
    """Trace the frame again if it computes with a number that is only kept so far."""
    for value in values:
        if isinstance(value, _KeptNumber):
            value.read_at_once()


def computing(operate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The handler of a bytecode that computes with what lies on the stack."""

    def handle(translator: Any, instruction: Any) -> None:
        read_at_once(translator.stack[-2:])
        operate(translator, instruction)

    return handle


def _call_builtin(variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    """The handler of a call of a function of Python's."""
    if len(args) == 1 and _makes_number(variable.fn, args[0]) and may_keep_number(
            translator, args[0]):
        return kept_number(translator, args[0])
    if variable.fn not in _LEFT_ALONE:
        read_at_once((*args, *kwargs.values()))
    return _builtin(variable, translator, args, kwargs)


def _makes_number(function: Any, value: Any) -> bool:
    """True for `float` of a tensor of floating point, and `int` of one of integers."""
    return isinstance(value, TensorVariable) and value.dtype is not None and (
        (function is float and value.dtype.is_floating_point)
        or (function is int and not (value.dtype.is_floating_point or value.dtype.is_complex
                                    or value.dtype == torch.bool)))


class _Append(VariableTracker):
    """The method `append` of a list that is not followed so far."""

    def __init__(self, made: LazyVariableTracker, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.made = made

    def call_function(self, translator: Any, args: Any, kwargs: Any) -> Any:
        output = translator.output
        if (len(args) == 1 and not kwargs and isinstance(args[0], _KeptNumber)
                and not self.made.is_realized()):
            vars(output).setdefault("_appended", []).append(
                (self.made.original_value(), self.made.original_source(), args[0]))
            return ConstantVariable.create(None)
        return self.made.realize().call_method(translator, "append", args, kwargs)

    def reconstruct(self, codegen: Any) -> None:
        codegen(self.made)
        codegen.append_output(codegen.create_load_attr("append"))


def _load_attribute(translator: Any, name: str) -> None:
    """The handler of the load of an attribute."""
    made = translator.stack[-1]
    if (name == "append" and isinstance(made, LazyVariableTracker) and not made.is_realized()
            and type(made.original_value()) is list and made.original_value() not in
            translator.output.side_effects and _is_outermost(translator)):
        translator.stack[-1] = _Append(made)
        return
    _attribute(translator, name)


def _update(effects: Any, codegen: Any, *args: Any, **kwargs: Any) -> None:
    """The maker of the code that changes what the traced code has changed."""
    _write_effects(effects, codegen, *args, **kwargs)
    for items, source, number in vars(codegen.tx.output).get("_appended", ()):
        if items in effects:
            number.read_at_once()  # The frame reads the list, too.
        codegen.add_push_null(lambda source=source: (
            codegen(source), codegen.append_output(codegen.create_load_attr("append"))))
        codegen(number)
        codegen.extend_output([*create_call_function(1, False), create_instruction("POP_TOP")])


def _has_none(effects: Any) -> bool:
    return not vars(effects.output_graph_weakref()).get("_appended") and _is_empty(effects)


_builtin = BuiltinVariable.call_function
_attribute = InstructionTranslatorBase._load_attr
_write_effects, _is_empty = SideEffects.codegen_update_mutated, SideEffects.is_empty

KEEPING: tuple[tuple[Any, str, Any], ...] = (
    (BuiltinVariable, "call_function", _call_builtin),
    (InstructionTranslatorBase, "_load_attr", _load_attribute),
    (SideEffects, "codegen_update_mutated", _update),
    (SideEffects, "is_empty", _has_none),
)
"""Classes of Dynamo, and what takes the place of a method of theirs."""
