"""Numbers that code reads from attributes, and that change from step to step.

Dynamo takes a number for a constant of what it compiles, and compiles again for another one: for a
temperature that is annealed, in each step.  Inside of `varying_numbers`, one that was another when
the same code was compiled before becomes an input of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import CodeType
from typing import Any
from unittest import mock

import torch._dynamo.config as dynamo_config
import torch._dynamo.utils as dynamo_utils
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, builder
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._functorch._aot_autograd import graph_compile
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils.weak import WeakIdKeyDictionary

_may_vary = ContextVar("numbers_may_vary", default=False)

_seen = WeakIdKeyDictionary()  # equal codes are one key of other dictionaries
"""The first value of each number that code reads, by its name in Dynamo."""
_constant = WeakIdKeyDictionary()
"""Code whose numbers are constants, as its graph with others was none that can be planned."""
_given_up: list[CodeType] = []
"""The code that is being compiled again, after its graph with numbers as inputs was given up."""
_VARIES = "checkpoint_planner_varies"
"""Marks a node of a graph that is such an input."""

_plain_float = VariableBuilder.wrap_symfloat
_plain_int = VariableBuilder.wrap_symint
_plain_is_constant = builder.is_int_specialization_case
_plain_format = InstructionTranslatorBase._format_value


def _varies(source: Any, value: float) -> bool:
    """True if a number is to be an input of the graph."""
    code = InstructionTranslator.current_tx().output.root_tx.f_code
    first = _seen.setdefault(code, {}).setdefault(str(source), value)
    return _may_vary.get() and first != value and code not in _constant


def _float(building: Any, value: float) -> Any:
    """Dynamo's variable for a float."""
    varies = _varies(building.source, value)
    with dynamo_config.patch(specialize_float=not varies, assume_static_by_default=not varies):
        return _marked(building, _plain_float(building, value)) if varies else (
            _plain_float(building, value))


def _is_constant(value: Any, source: Any) -> bool:
    """True if Dynamo takes a whole number for a constant, as it does with those of modules."""
    return bool(_plain_is_constant(value, source)) and not (
        source.guard_source.is_unspecialized_nn_module() and _varies(source, value))


def _int(building: Any, value: int, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's variable for a whole number."""
    if args or kwargs or not building.source.guard_source.is_unspecialized_nn_module() or not (
            _varies(building.source, value)):
        return _plain_int(building, value, *args, **kwargs)
    return _marked(building, _plain_int(building, value, DimDynamic.DYNAMIC))


def _format(translator: Any, form: Any, flags: int) -> None:
    """Dynamo's text of a value; of a number that is an input it would be the number."""
    if isinstance(translator.stack[-1], SymNodeVariable):
        translator.push(ConstantVariable.create(translator.pop().evaluate_expr()))
    _plain_format(translator, form, flags)


def _marked(building: Any, variable: Any) -> Any:
    if not variable.is_python_constant():
        variable.as_proxy().node.meta[_VARIES] = building.tx.output.root_tx.f_code
    return variable


@contextlib.contextmanager
def numbers_noted() -> Iterator[None]:
    """Inside, it is noted which numbers code reads while Dynamo compiles it."""
    with (mock.patch.object(VariableBuilder, "wrap_symfloat", _float),
          mock.patch.object(VariableBuilder, "wrap_symint", _int),
          mock.patch.object(builder, "is_int_specialization_case", _is_constant),
          mock.patch.object(dynamo_utils, "is_int_specialization_case", _is_constant),
          mock.patch.object(InstructionTranslatorBase, "_format_value", _format)):
        yield


@contextlib.contextmanager
def varying_numbers() -> Iterator[None]:
    """Inside, within `numbers_noted`, a number that was another one when the same code was compiled
    before becomes an input of the graph."""
    token = _may_vary.set(True)
    try:
        yield
    finally:
        _may_vary.reset(token)


def numbers_stay_numbers() -> contextlib.AbstractContextManager[Any]:
    """Inside, AOTAutograd does not turn what is computed with numbers into ops on tensors."""
    return mock.patch.object(graph_compile, "tensorify_python_scalars", lambda *_: None)


def _reader(module: fx.GraphModule) -> CodeType | None:
    """The code that reads a number which is an input of its graph; `None`: there is none."""
    return next((node.meta[_VARIES] for node in module.graph.nodes if _VARIES in node.meta), None)


def has_varying_numbers(module: fx.GraphModule) -> bool:
    """True if a graph that Dynamo captured has numbers as inputs."""
    return _reader(module) is not None


def compile_otherwise(module: fx.GraphModule, *, is_other: bool) -> None:
    """Let Dynamo give up the graph that it is compiling, if it has numbers as inputs, for one in
    which they are constants.  `is_other`: it is none that was planned; if that with constants is
    none either, it is given up for the one before, which then need not be.  Returns where neither
    is the case."""
    code = _reader(module)
    if code is not None and not _given_up:
        _constant[code] = True
        _given_up.extend([code] if is_other else [])
    elif code is None and _given_up:
        del _constant[_given_up[0]]
    else:
        _given_up.clear()
        return
    raise TensorifyScalarRestartAnalysis(restart_reason="numbers are constants")


@contextlib.contextmanager
def constants_otherwise(module: fx.GraphModule, is_other: Callable[[Exception], bool]
                        ) -> Iterator[None]:
    """Inside, a graph with numbers as inputs is compiled; where that fails, `compile_otherwise`."""
    try:
        yield
        _given_up.clear()
    except TensorifyScalarRestartAnalysis:
        raise
    except Exception as error:
        compile_otherwise(module, is_other=is_other(error))
        raise
