"""Dynamo made to follow the branches that a model's code takes in plain eager mode.

The model of the world: code that asks whether it is being compiled takes other ways then, and so
calls other kernels: transformers builds attention masks that it otherwise leaves out, and repeats
grouped keys.  Such code is told that it is not.  What it then asks of tensors (`if mask.all()`) is
worked out at once where it follows from the call's inputs, sizes and buffers, which are known
before the step; the graph goes on as the answer says, and holds a mark from which `branches_of`
makes a condition.  Whoever runs the graph checks the conditions first.

Such code may also mind the limits of the tracer.  Where what it does then cannot be traced, the
frame is traced again, and that code is told the truth.  A number that code takes of a tensor and
only keeps breaks no graph (`kept_numbers`).

Blind spots: a value that depends on parameters or activations, and a number that code computes
with, breaks the graph as under torch.compile; torch's own code is told the truth.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch._dynamo.external_utils
import torch._utils
from torch import fx, nn
from torch._dynamo.exc import UnspecializeRestartAnalysis, Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, SkipFunctionVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.utils import _pytree as pytree

from planner._graph_capture.torch_compat.kept_numbers import (
    COMPUTING,
    KEEPING,
    computing,
    kept_number,
    may_keep_number,
    read_at_once,
)
from planner._graph_capture.torch_compat.memory import (
    is_traceable_wrapper_subclass,
    no_active_modes,
    storage_key,
)
from planner._graph_capture.torch_compat.symbols import expression_of, function_of

KNOWN_BYTES = 1 << 24
"""Values are worked out from tensors of at most this size."""
_MARK = "branch"
_HELPERS = 3
"""Largest number of frames between torch and the code that asks if it is compiled."""
_WHILE_COMPILING = tuple(getattr(owner, name) for owner, name in (
    (torch.compiler, "is_compiling"), (torch.compiler, "is_dynamo_compiling"),
    (torch._utils, "is_compiling"), (torch._dynamo.external_utils, "is_compiling"),
) if hasattr(owner, name))
_WHILE_CAPTURING = tuple(device.is_current_stream_capturing for device in (torch.cuda, torch.xpu)
                         if hasattr(device, "is_current_stream_capturing"))
_OPCODES = ("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE",
            "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_TRUE",
            "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP", "UNARY_NOT")

_value_of: ContextVar[Callable[[torch.Tensor], torch.Tensor | None]] = ContextVar("value_of")


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A condition on the inputs of a graph, which holds where the graph is the step's."""

    graph: fx.GraphModule
    """Makes of some inputs, and of sizes, the value that the model's code asked for."""
    inputs: tuple[int, ...]
    """Positions of these inputs."""
    sizes: tuple[tuple[int, int | None], ...]
    """Position of an input and its dimension, for each size that is a symbol; `None`: the input is
    the size."""
    taken: bool
    """The value that the code went on with."""
    place: str
    """Location of the code that asked."""

    def holds(self, args: Sequence[Any]) -> bool:
        """True if the code would go on with these inputs of the graph as the graph does."""
        with torch.no_grad():
            return bool(self.graph(
                *(args[position] for position in self.inputs),
                *(args[position] if place is None else args[position].size(place)
                  for position, place in self.sizes))) is self.taken


def is_small_input(tensor: torch.Tensor) -> bool:
    """True for plain tensors without gradient that are not too large to work with."""
    return (not isinstance(tensor, nn.Parameter) and tensor.layout is torch.strided
            and not tensor.requires_grad and _is_small(tensor))


def may_be_known(tensor: torch.Tensor) -> bool:
    """True if values of such an input are kept: integers, and single numbers."""
    return is_small_input(tensor) and has_discrete_values(tensor)


def has_discrete_values(tensor: torch.Tensor) -> bool:
    """True for plain tensors of integers and single numbers that are not too large to work with."""
    return _is_small(tensor) and (
        tensor.numel() <= 1 or not (tensor.is_floating_point() or tensor.is_complex()))


def _is_small(tensor: torch.Tensor) -> bool:
    return (not is_traceable_wrapper_subclass(tensor)
            and tensor.numel() * tensor.dtype.itemsize <= KNOWN_BYTES)


@contextlib.contextmanager
def as_plain_code(values: Callable[[], Mapping[int, torch.Tensor]],
                  is_written: Callable[[torch.Tensor], bool] = lambda tensor: False
                  ) -> Iterator[None]:
    """Inside, what Dynamo traces takes the branches of plain eager code.

    `values`: returns, by identity of a tensor that the code is called with, the one that has its
    values; called when code asks for one.  `is_written`: returns whether the tensor has other
    values by now.
    """
    found = functools.cache(values)

    def value_of(given: torch.Tensor) -> torch.Tensor | None:
        known = found().get(id(given))
        return None if known is None or not is_small_input(known) or is_written(given) else known

    token = _value_of.set(value_of)
    replaced: list[tuple[Any, str, Any]] = [
        (TorchInGraphFunctionVariable, "call_function", _answering_call(_call)),
        (SkipFunctionVariable, "call_function", _answering_call(_skipped_call)),
        (TensorVariable, "call_method", _call_method_as_plain),
        (WrapperUserFunctionVariable, "call_function", _call_wrapped),
        *KEEPING,
        (InstructionTranslatorBase, "run", _run_frame),
        *((kind, "dispatch_table", _answering_table(kind))
          for kind in _translators(InstructionTranslatorBase))]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        _value_of.reset(token)


_call, _skipped_call = (
    TorchInGraphFunctionVariable.call_function, SkipFunctionVariable.call_function)
_call_method = TensorVariable.call_method
_wrapped = WrapperUserFunctionVariable.call_function
_run = InstructionTranslatorBase.run


def _call_method_as_plain(variable: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The handler of a method of a tensor: also of `random_`, at which Dynamo breaks the graph
    since one of its overloads, with a lower bound, has a keyword of Python as its name, and of
    `item`, by which `bool` asks as well."""
    if name == "item" and variable.dtype == torch.bool:
        answer = _answer(translator, variable)
        if answer is not None:
            return ConstantVariable.create(answer)
    if name == "item" and not args and may_keep_number(translator, variable):
        return kept_number(translator, variable)
    if name == "random_" and len(args) < 2 and not kwargs:
        return wrap_fx_proxy(translator, translator.output.create_proxy(
            "call_method", name, tuple(each.as_proxy() for each in (variable, *args)), {}))
    return _call_method(variable, translator, name, args, kwargs)


@functools.cache
def _answering_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a call of a function of torch that may ask whether code is compiled."""

    def handle(variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        if ((variable.value in _WHILE_COMPILING and _is_told_no(translator))
                or variable.value in _WHILE_CAPTURING):
            return ConstantVariable.create(False)
        return call(variable, translator, args, kwargs)

    return handle


class _CachedObject(UserDefinedObjectVariable):
    """An object that a cached function has returned."""


def _call_wrapped(variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    """The handler of a call of a wrapped function.  One under `functools.lru_cache` whose arguments
    are plain values is called, and not traced: its result follows from them.  So the patterns of
    `einops` are read once."""
    given = [each.realize() for each in args]
    named = {name: each.realize() for name, each in kwargs.items()}
    is_cached = type(variable) is WrapperUserFunctionVariable and isinstance(
        variable.wrapper_obj, _CACHED)
    if is_cached and all(isinstance(each, _CachedObject) or each.is_python_constant()
                         for each in (*given, *named.values())):
        with contextlib.suppress(Exception), no_active_modes():  # what it raises, tracing raises
            found = variable.wrapper_obj(
                *map(_value, given), **{name: _value(each) for name, each in named.items()})
            if _is_plain(found):
                return VariableTracker.build(translator, found)
            if _is_plain(vars(found)):
                return _CachedObject(found)
    return _wrapped(variable, translator, args, kwargs)


_CACHED = type(functools.lru_cache(len))


def _value(variable: Any) -> Any:
    return (variable.value if isinstance(variable, _CachedObject)
            else variable.as_python_constant())


def _is_plain(value: Any) -> bool:
    """True for numbers, texts, and containers of them."""
    return all(map(ConstantVariable.is_literal, pytree.tree_leaves(value)))


def _is_told_no(translator: Any) -> bool:
    """True if the code that is traced is told that it is not being compiled."""
    if str(translator.f_globals.get("__name__")).partition(".")[0] == "torch":
        return False
    frames = [translator]
    while len(frames) < _HELPERS and frames[-1].parent is not None:
        frames.append(frames[-1].parent)
    if any(frame.f_code in _told_truth(frame) for frame in frames):
        return False
    for frame in frames:
        frame._was_told_no = True
    return True


def _told_truth(translator: Any) -> set[types.CodeType]:
    """Code that could not be traced as it went on when it was told otherwise; as long as one frame
    is traced, from the start again and again."""
    return vars(translator.speculation_log).setdefault("_told_truth", set())


def _run_frame(translator: Any) -> None:
    """Trace one frame of Python."""
    try:
        _run(translator)
    except Unsupported:
        if translator.parent is None or not getattr(translator, "_was_told_no", False):
            raise
        _told_truth(translator).add(translator.f_code)
        raise UnspecializeRestartAnalysis(
            restart_reason="code that asked whether it is compiled cannot be traced") from None


def _translators(kind: Any) -> Iterator[Any]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _translators(inner)


@functools.cache
def _answering_table(kind: Any) -> list[Any]:
    """The handlers of a class of translators, by number of the bytecode."""
    return [_answering(handler) if name in _OPCODES
            else computing(handler) if name.startswith(COMPUTING) else handler
            for name, handler in zip(dis.opname, kind.dispatch_table, strict=False)]


def _answering(jump: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The handler of a bytecode that looks at the truth of what lies on the stack."""

    def handle(translator: Any, instruction: Any) -> None:
        value = translator.stack[-1].realize() if translator.stack else None
        if isinstance(value, TensorVariable):
            answer = _answer(translator, value)
            if answer is not None:
                translator.stack[-1] = constant = ConstantVariable.create(answer)
                jump(translator, instruction)
                if translator.stack and translator.stack[-1] is constant:
                    translator.stack[-1] = value  # `a or b` gives `a` itself
                return
        read_at_once([value])
        jump(translator, instruction)

    return handle


def _answer(translator: Any, value: TensorVariable) -> bool | None:
    """The truth of a traced tensor in the step that is traced; `None`: it is not known."""
    node = value.as_proxy().node
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.numel() != 1:
        return None
    part = _part_behind(node)
    if part is None:
        return None
    givers = _givers(node.graph)
    if any(symbol not in givers for symbol in part.sizes):
        return None
    values: list[Any] = []
    needed = (*part.inputs, *(givers[symbol].input for symbol in part.sizes))
    if any("grapharg" not in each.meta for each in needed):  # those of a function of the graph's
        return None
    for placeholder in part.inputs:
        known = _value_of.get()(placeholder.meta["grapharg"].example)
        if known is None:
            return None
        values.append(known)
    values += [givers[symbol].size.node.hint for symbol in part.sizes]
    with no_active_modes(), torch.no_grad():
        before = torch.get_rng_state()
        answer = bool(part.graph(*values))
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            return None
    if node.op == "placeholder":  # torch leaves out inputs that no op reads
        node = wrap_fx_proxy(translator, translator.output.create_proxy(
            "call_method", "detach", (value.as_proxy(),), {})).as_proxy().node
    frame = translator.frame_summary()
    node.meta[_MARK] = answer, f"{frame.filename}:{frame.lineno}"
    return answer


def branches_of(module: fx.GraphModule) -> tuple[Branch, ...]:
    """The conditions under which a graph that was captured inside `as_plain_code` is the step's."""
    positions = {node: position for position, node in
                 enumerate(module.graph.find_nodes(op="placeholder"))}
    found = []
    for node in module.graph.nodes:
        part = _part_behind(node) if _MARK in node.meta else None
        if part is not None and (part.inputs or part.sizes):
            givers = _givers(module.graph)
            found.append(Branch(
                part.graph, tuple(positions[each] for each in part.inputs),
                tuple((positions[giver.input], giver.place)
                      for giver in map(givers.__getitem__, part.sizes)), *node.meta[_MARK]))
    return tuple(found)


def written_inputs(module: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the inputs to which a graph that Dynamo captures writes."""
    written = set().union(*(_storages_of(node.all_input_nodes) for node in module.graph.nodes
                            if _may_write(node)))
    return tuple(position for position, node in
                 enumerate(module.graph.find_nodes(op="placeholder"))
                 if written & _storages_of([node]))


class _Giver(NamedTuple):
    """An input of a graph that gives a symbol."""

    input: fx.Node
    place: int | None
    """The dimension that is the symbol; `None`: the input is."""
    size: torch.SymInt


def _givers(graph: fx.Graph) -> dict[Any, _Giver]:
    """Which input gives each symbol."""
    found: dict[Any, _Giver] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        sizes = ([(None, value)] if isinstance(value, torch.SymInt)
                 else enumerate(value.shape) if isinstance(value, torch.Tensor) else [])
        for place, size in sizes:
            if isinstance(size, torch.SymInt):
                found.setdefault(expression_of(size), _Giver(node, place, size))
    return found


class _Part(NamedTuple):
    """The part of a graph that makes one value."""

    graph: fx.GraphModule
    """Takes the inputs and then the sizes."""
    inputs: list[fx.Node]
    sizes: list[Any]
    """The symbols in what it reads of sizes."""


def _part_behind(last: fx.Node) -> _Part | None:
    """The part that makes a value of inputs; `None` where running it by itself might change them,
    or reads anything else.  What a size is the size of is no part of it, and neither is what is
    written later."""
    needed, waiting = {last}, [last]
    writes = [node for node in itertools.takewhile(lambda node: node is not last, last.graph.nodes)
              if _may_write(node)]
    while waiting:
        node = waiting.pop()
        if isinstance(node.meta.get("example_value"), torch.SymInt):
            continue
        if node.op not in ("placeholder", "call_function", "call_method"):
            return None
        if _may_write(node):
            return None
        for source in node.all_input_nodes:
            if source not in needed:
                needed.add(source)
                waiting.append(source)
    read = _storages_of(needed)
    if any(read & _storages_of(node.all_input_nodes) for node in writes):  # by a view, too
        return None
    ordered = [node for node in last.graph.nodes if node in needed]
    sizes = {node: node.meta["example_value"] for node in ordered
             if isinstance(node.meta.get("example_value"), torch.SymInt)}
    symbols = sorted({symbol for size in sizes.values()
                      for symbol in expression_of(size).free_symbols}, key=str)
    inputs = [node for node in ordered if node.op == "placeholder" and node not in sizes]
    graph = fx.Graph()
    copies = {node: graph.node_copy(node) for node in inputs}
    given = [graph.placeholder(f"size_{place}") for place in range(len(symbols))]
    for node in ordered:
        if node in sizes:
            copies[node] = graph.call_function(
                function_of(expression_of(sizes[node]), symbols), tuple(given))
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[last])
    return _Part(fx.GraphModule({}, graph), inputs, symbols)


def _storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages of the tensors that nodes of a graph of Dynamo's make."""
    return {storage_key(leaf) for node in nodes
            for leaf in pytree.tree_leaves(node.meta.get("example_value"))
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided}


def _may_write(node: fx.Node) -> bool:
    """True if a node of a graph of Dynamo's may change its operands."""
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return "out" in node.kwargs
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _WRITERS or (name.endswith("_") and not name.endswith("__"))


_WRITERS = frozenset({"setitem", "__setitem__", "iadd", "iand", "ifloordiv", "ilshift",
                      "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv",
                      "ixor"})
