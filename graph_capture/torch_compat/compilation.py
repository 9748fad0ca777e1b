"""Private names of torch that capturing and running compiled regions needs."""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._dynamo import lookup_backend as lookup_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.eval_frame import (
    _debug_get_cache_entry_list,
    reset_code,
    set_code_exec_strategy,
)
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._dynamo.exc import unimplemented
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.polyfills.builtins import enumerate as _traced_enumerate
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from planner._graph_capture.module_forward import call_forward
from planner._graph_capture.torch_compat.dispatch import decompositions_off
from planner._graph_capture.torch_compat.recurrent import (
    lstm_shapes_at_once,
    recurrent_layers_trained,
)
from planner._graph_capture.torch_compat.varying_numbers import numbers_noted, numbers_stay_numbers

PartitionFunction = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """An op's arguments, results and mutations."""
    return op._schema


def written_tensors(op: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
                    ) -> list[torch.Tensor]:
    """The tensors among an op's arguments that it writes."""
    if not isinstance(op, OpOverload) or not schema_of(op).is_mutable:
        return []
    arguments = schema_of(op).arguments
    values = {**dict(zip([each.name for each in arguments], args, strict=False)), **kwargs}
    return [leaf for each in arguments if each.alias_info is not None and each.alias_info.is_write
            for leaf in pytree.tree_leaves(values.get(each.name)) if isinstance(leaf, torch.Tensor)]


def aten_name(op: OpOverload) -> str:
    """An op's name without overload, and without the namespace if that is aten."""
    return schema_of(op).name.removeprefix("aten::")


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """`function`, whose argument is a list that it empties, marked so that AOTAutograd passes it
    the only reference to the elements."""

    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def aot_backend(partition: PartitionFunction, forward_compiler: Callable[..., Any],
                backward_compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A Dynamo backend that runs AOTAutograd with this partitioner and these compilers, without
    decompositions."""

    def for_any_backward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # torch refuses `retain_graph=True` after a backward without it unless this is a list.
        context = TracingContext.try_get()
        metadata = None if context is None else context.fw_metadata
        if metadata is not None and metadata.bw_donated_idxs is None:
            metadata.bw_donated_idxs = []
        return backward_compiler(graph, inputs)

    compiled = aot_autograd(fw_compiler=forward_compiler, bw_compiler=for_any_backward,
                            inference_compiler=forward_compiler, partition_fn=partition)

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        with (recurrent_layers_trained(module, fused=True), decompositions_off(),
              numbers_stay_numbers(),
              # Random ops stay in the graph though nothing reads them: they draw numbers.
              inductor_config.patch(fallback_random=True)):
            return compiled(module, inputs, **options)

    return backend


AUTOGRAD_HOLDS_COTANGENTS = not hasattr(torch.autograd.Function, "boxed_grads_call")
"""True if the cotangents of a compiled backward stay allocated until that ends (torch before 2.13),
not only until their last use."""


_donates_buffers: ContextVar[bool | None] = ContextVar("donates_buffers", default=None)
"""Set inside of `compile_settings`."""
_SETTINGS = threading.RLock()
"""Held inside of `compile_settings`, which change Dynamo for all threads."""


@contextlib.contextmanager
def compile_settings(*, donated_buffers: bool = False) -> Iterator[None]:
    """Settings under which models are captured and applied; the user's own are restored after.

    - Calls of `logging` methods and `warnings.warn` are skipped instead of breaking the graph.
    - An error of the backend reaches the user instead of a silent fall-back to eager.
    - AOTAutograd's cache is not used (it would bypass the partitioner), and donated buffers, which
      forbid `retain_graph=True`, only on request: as the user set them.
    - One code object may be compiled for many models and plans.
    - Under DistributedDataParallel the graph is not cut at the buckets.
    - `nn.RNN`, `nn.GRU` and `nn.LSTM` are captured, op by op, instead of breaking the graph.
    - Hooks that modules get or lose later are seen; torch would go on without them.
    - Where the graph breaks in a loop, the regions in between are captured, separately for each
      turn; torch would run all of the code as it is written.
    - The graph breaks where a value that requires a gradient is assigned by a mask: its backward
      selects, and the size of a selection depends on values.
    - The graph breaks where a tensor is given other data (`tensor.data = other`), which AOTAutograd
      cannot do after the graph has run.
    - The backward is traced without autocast, as the plain step runs it; torch would trace it under
      that of the forward, and cast what the model keeps in 32 bits.
    - NumPy's random numbers are NumPy's: the graph breaks where they are drawn, in place of drawing
      from torch's.  It breaks at Python's too, which would be tensors, whose values no code may
      decide by.
    - Code in which there was nothing to capture when it first ran is examined again when it runs
      another way; torch would skip it for ever.

    Entering them takes a quarter of a millisecond, but not where they apply already.  One thread at
    a time is inside.
    """
    if _donates_buffers.get() == donated_buffers:
        yield
        return
    token = _donates_buffers.set(donated_buffers)
    loggers = {method for name in _LOG_METHODS
               if callable(method := getattr(logging.Logger, name, None))}
    with (
        _SETTINGS,
        dynamo_config.patch(
            ignore_logging_functions={
                *dynamo_config.ignore_logging_functions, *loggers, warnings.warn},
            suppress_errors=False,
            recompile_limit=max(dynamo_config.recompile_limit, 256),
            accumulated_recompile_limit=max(dynamo_config.accumulated_recompile_limit, 4096),
            allow_empty_graphs=True,
            allow_rnn=True,
            # torch.compile(dynamic=True), whose backend may be what captures, sets it otherwise.
            assume_static_by_default=True,
            automatic_dynamic_shapes=False,
            optimize_ddp=False,
            skip_nnmodule_hook_guards=False,
            use_numpy_random_stream=True,
        ),
        functorch_config.patch(
            backward_pass_autocast="off", enable_autograd_cache=False, debug_assert=False,
            donated_buffer=donated_buffers and functorch_config.donated_buffer,
        ),
        mock.patch.object(InstructionTranslatorBase, "maybe_has_backedge", _ends_at_break),
        mock.patch.object(TensorVariable, "method___setitem__", _assign),
        mock.patch.object(UserDefinedObjectVariable, "_supported_random_functions", frozenset),
        mock.patch.object(GetAttrVariable, "call_method", _call_method),
        lstm_shapes_at_once(),
        numbers_noted(),
        mock.patch.object(OutputGraph, "create_proxy", _create_proxy),
        # Dynamo can break inside of an iteration over a tuple, but not over the values of a dict,
        # and not inside of a generator.
        mock.patch.object(nn.ModuleList, "__iter__", _over_tuple),
        mock.patch.object(nn.Sequential, "__iter__", _over_tuple),
        mock.patch.object(_traced_enumerate, "__torch_dynamo_polyfill__", _enumerate),
        mock.patch.object(BuiltinVariable, "call_zip", _zip),
        mock.patch.object(BuiltinVariable, "call_range", _range),
        # torch 2.11 cannot log a set of functions; where a graph breaks, code runs as written.
        _quiet("torch._dynamo.metrics_context", "torch._dynamo.exc"),
    ):
        try:
            yield
        finally:
            _donates_buffers.reset(token)


def _over_tuple(modules: nn.Module) -> Iterator[nn.Module | None]:
    return iter(tuple(modules._modules.values()))


_plain_enumerate: Callable[..., Any] = getattr(_traced_enumerate, "__torch_dynamo_polyfill__")  # noqa: B009


def _enumerate(iterable: Any, start: int = 0) -> Any:
    """Dynamo's `enumerate`."""
    if isinstance(iterable, list | tuple | nn.ModuleList | nn.Sequential):
        return iter(tuple(zip(range(start, start + len(iterable)), iterable, strict=True)))
    return _plain_enumerate(iterable, start)


_plain_zip = BuiltinVariable.call_zip


def _zip(builtin: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's `zip`; code that goes on behind a graph break cannot take one."""
    zipped = _plain_zip(builtin, translator, *args, **kwargs)
    if not args or not all(issubclass(each.python_type(), _SEQUENCES) for each in args):
        return zipped
    for convert in (tuple, iter):
        zipped = _called(translator, convert, zipped)
    return zipped


def _called(translator: Any, function: Callable[..., Any], *operands: Any) -> Any:
    """Dynamo's result of a call."""
    return VariableTracker.build(translator, function).call_function(translator, [*operands], {})


_SEQUENCES = (list, tuple, range, nn.ModuleList, nn.Sequential)

_plain_range = BuiltinVariable.call_range


def _range(builtin: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's `range`, which takes the sizes that it is given for constants: each length of a loop
    over chunks of a sequence would be traced by itself.  Only their number is one here."""
    if kwargs or not any(isinstance(each, SymNodeVariable) for each in args) or not all(
            isinstance(each, SymNodeVariable | ConstantVariable) for each in args):
        return _plain_range(builtin, translator, *args, **kwargs)
    zero, one = map(ConstantVariable.create, (0, 1))
    start, stop, step = (zero, *args, one) if len(args) == 1 else (*args, one)[:3]
    low, high, by = (each.sym_num if isinstance(each, SymNodeVariable)
                     else each.as_python_constant() for each in (start, stop, step))
    if not by > 0:
        return _plain_range(builtin, translator, *args)

    count = max(0, int((high - low + by - 1) // by))
    return TupleVariable([
        _called(translator, operator.add, start, _called(
            translator, operator.mul, step, ConstantVariable.create(number)))
        for number in range(count)])


_may_loop = InstructionTranslatorBase.maybe_has_backedge


def _ends_at_break(translator: Any) -> bool:
    """True if a graph break in a loop makes all of the code run as it is written.

    Without gradients there is nothing to plan, and compiled code would use more memory than the
    original: in the loop of a custom `autograd.Function`, for one.
    """
    return not torch.is_grad_enabled() and bool(_may_loop(translator))


_plain_assign = TensorVariable.method___setitem__


def _assign(tensor: Any, translator: Any, key: Any, value: Any) -> Any:
    """Dynamo's `tensor[key] = value`."""
    keys = key.items if isinstance(key, TupleVariable) else [key]
    if isinstance(value, TensorVariable) and value.requires_grad and any(
            isinstance(each, TensorVariable) and each.dtype in (torch.bool, torch.uint8)
            for each in keys):
        unimplemented(gb_type="Assignment by a mask", context="", hints=[], explanation=(
            "The backward selects by the mask, and the size of a selection depends on values."))
    return _plain_assign(tensor, translator, key, value)


_plain_call_method = GetAttrVariable.call_method


def _call_method(attribute: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Dynamo's call of an attribute's method; before torch 2.15 it knows no names of torch's
    classes: `type(layer.weight).__module__.startswith("torchao.")`."""
    text = getattr(getattr(attribute.obj, "value", None), attribute.name, None)
    if isinstance(attribute.obj, TorchInGraphFunctionVariable) and isinstance(text, str):
        return ConstantVariable.create(text).call_method(translator, name, args, kwargs)
    return _plain_call_method(attribute, translator, name, args, kwargs)


_plain_create_proxy = OutputGraph.create_proxy
_GIVE_OTHER_DATA = {"set_", "shallow_copy_data_"}  # the second from torch 2.15 on
_FILLS = {"cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "uniform_"}


def _create_proxy(graph: Any, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's new op of the graph."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in _GIVE_OTHER_DATA:
        unimplemented(gb_type="Assignment of a tensor's data", context="", hints=[], explanation=(
            "AOTAutograd updates inputs after the graph has run, by copying into them."))
    if name in _FILLS and any(
            isinstance(each, fx.Proxy) and isinstance(each.node.meta["example_value"], torch.Tensor)
            for each in args[0][1:]):
        unimplemented(gb_type="Bounds of random numbers in tensors", context="", hints=[],
                      explanation="Their values are read; where they follow from sizes, which may "
                                  "vary, they would be constants of the graph.")
    return _plain_create_proxy(graph, kind, target, *args, **kwargs)


_LOG_METHODS = frozenset({
    "debug", "info", "warning", "error", "critical", "exception", "log",
    # Added to every logger by transformers.
    "warning_once", "info_once", "warning_advice",
})


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep torch from logging a traceback if an op refuses fake tensors or the model asks for a
    tensor's value: the error that follows, if any, says the same in one line."""
    with _quiet("torch._subclasses.fake_tensor", "torch._dynamo.variables.tensor"):
        yield


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Inside, these loggers report only critical messages.  A filter, as a level would empty the
    caches of all loggers."""
    loggers = [logging.getLogger(name) for name in names]
    for each in loggers:
        each.addFilter(_is_critical)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(_is_critical)


def _is_critical(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL


def wrapping_data_parallel() -> nn.Module | None:
    """The DistributedDataParallel whose forward is running, if any."""
    running: nn.Module | None = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return running


def sharded_module(model: nn.Module) -> str | None:
    """The first of a model's modules to which `fully_shard` was applied, if any."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import
    return None if fsdp is None or not torch.distributed.is_initialized() else next(
        (name or type(model).__name__ for name, module in model.named_modules()
         if isinstance(module, fsdp.FSDPModule)), None)


def is_compiled(module: nn.Module) -> bool:
    """True for what `torch.compile` returns for a module, and after `module.compile()`."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


@contextlib.contextmanager
def called_unseen(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, Dynamo sees no hook of these modules: the code that it compiles breaks where it calls
    one, and nowhere else, whoever has put hooks there (fully_shard, the user, capture)."""
    before = [(module, vars(module).get("_compiled_call_impl")) for module in modules]
    for module, _ in before:
        module._compiled_call_impl = torch.compiler.disable(module._call_impl)
    try:
        yield
    finally:
        for module, compiled in before:
            del module._compiled_call_impl
            if compiled is not None:
                module._compiled_call_impl = compiled


def compile_forward(name: str, backend: Callable[..., Any], *, dynamic: bool | None = False
                    ) -> Callable[..., Any]:
    """A function of a module, the forward that its instance has (`None`: that of its class) and
    arguments, which Dynamo compiles with `backend`.

    The function has a code object of its own, since Dynamo's cache (and its limit on recompiles)
    hangs on the code; and it stands outside of torch, whose own modules Dynamo would skip.  Modules
    that differ in nothing but their tensors share the compiled code: torch takes parameters for
    inputs of the code.  What was compiled goes with the function, and torch, which never lets go of
    a backend, is given a reference to `backend`, which the caller holds, where it is an object.
    Code of the user's that the function runs, and in which the graph breaks, is compiled whatever
    torch made of it for others before.  `dynamic`: `None` for dimensions that are marked as
    symbolic; by default all sizes are fixed.
    """
    _compile_again()
    code = call_forward.__code__.replace(co_name=f"_call_{name}")
    function = types.FunctionType(code, call_forward.__globals__)
    weakref.finalize(function, reset_code, code).atexit = False
    is_object = not isinstance(backend, str | types.FunctionType | types.MethodType)
    return torch.compile(
        function, backend=_referred_to(backend) if is_object else backend, dynamic=dynamic)


_MOST_GONE = 16
"""Entries in the cache of one code that nothing uses."""


def _compile_again() -> None:
    """Let torch compile code again on which it has given up, whoever ran it: because it was
    compiled as often as the settings allow, or because a graph broke in a loop of it.  The code of
    `nn.Sequential` is such a loop, shared by all models.  What was compiled with backends that are
    gone counts against these limits; it is dropped, all of the code's at once, which is why a few
    are kept beside what is in use."""
    for reference in list(input_codes.seen):  # all code that torch ever examined
        if (code := reference()) is None:
            continue
        backends = [entry.backend for entry in _debug_get_cache_entry_list(code)]
        gone = sum(map(_is_gone, backends))
        if gone and (gone == len(backends) or gone > _MOST_GONE):
            reset_code(code)
        else:
            set_code_exec_strategy(
                code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def _is_gone(backend: Any) -> bool:
    owner = getattr(getattr(backend, "compiler_fn", backend), "owner", None)
    return isinstance(owner, weakref.ref) and owner() is None


def _referred_to(backend: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.ref(backend)

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found = reference()
        assert found is not None
        compiled: Callable[..., Any] = found(module, inputs)
        return compiled

    compile_graph.owner = reference  # type: ignore[attr-defined]
    return compile_graph


def weakly(call: Callable[..., Any], as_written: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch calls in place of `call`, with a weak reference to it, and which calls
    `as_written` when that is gone.  torch keeps compiled code of user functions with graph breaks
    after the model is freed, and runs it for any backend once it has compiled such a function as
    often as the settings allow."""
    reference = weakref.ref(call)

    def run(*args: Any) -> Any:
        return (reference() or as_written)(*args)

    return torch.compiler.disable(run)


_SIZE_MARKS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices",
               "_dynamo_propagated_dynamic_indices", "_dynamo_unbacked_indices",
               "_dynamo_strict_unbacked_indices", "_dynamo_static_indices",
               "_has_dynamo_dim_marking")


@contextlib.contextmanager
def sizes_as_they_are(tree: object) -> Iterator[None]:
    """Inside, the marks of `torch._dynamo.mark_dynamic` and similar functions on these tensors are
    removed: a plan's code is compiled for the actual sizes."""
    removed = [(leaf, mark, getattr(leaf, mark)) for leaf in pytree.tree_leaves(tree)
               if isinstance(leaf, torch.Tensor)
               for mark in _SIZE_MARKS if hasattr(leaf, mark)]
    for tensor, mark, _ in removed:
        delattr(tensor, mark)
    try:
        yield
    finally:
        for tensor, mark, value in removed:
            setattr(tensor, mark, value)


def sizes_may_vary(may: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, a size that was another one when the same code was compiled before becomes symbolic,
    as under `torch.compile` by default; `may=False`: each size is a constant of the code."""
    return dynamo_config.patch(automatic_dynamic_shapes=may)


class TraceLimit:
    """CPU time that a trace with symbolic sizes may take."""

    def __init__(self, seconds: float) -> None:
        self.exceeded: TimeoutError | None = None
        """The error with which it has ended."""
        self._seconds = seconds

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, a trace ends with an error once it has taken that much: what torch computes of
        nested divisions and remainders of sizes may take minutes, or not end."""
        end = time.thread_time() + self._seconds
        evaluate = ShapeEnv.evaluate_expr

        def limited(*args: Any, **kwargs: Any) -> Any:
            if time.thread_time() > end:
                self.exceeded = TimeoutError(
                    f"the trace took more than {self._seconds:.0f} s of CPU time")
                raise self.exceeded
            return evaluate(*args, **kwargs)

        with mock.patch.object(ShapeEnv, "evaluate_expr", limited):
            yield


def copied_module(owner: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A new module with a copy of the graph and the owner's attributes; nodes keep their names."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
    return module_of(owner, copy)


def module_of(owner: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A new module with a graph and the owner's attributes.  Its code is generated when it is
    called, as most are not."""
    return _LazyGraphModule(owner, graph)


def split_joint_graph(
    joint: fx.GraphModule, saved: Sequence[fx.Node], num_forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules in the calling convention of AOTAutograd's runtime; `saved`
    are the nodes that cross over (the extraction drops those that the backward does not read)."""
    sizes = [node for node in saved if isinstance(node.meta.get("val"), torch.SymInt)]
    with _use_lazy_graph_module(True):
        return _extract_fwd_bwd_modules(joint, [node for node in saved if node not in sizes], sizes,
                                        num_fwd_outputs=num_forward_outputs)


def boxed_callable(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the module's generated code as a function of a list of arguments, which it empties."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    _LazyGraphModule.force_recompile(module)
    return boxed(module.forward)


class _BoxedCodeGen(CodeGen):
    """Generated code whose argument is one list, which it empties, so that each argument is freed
    after its last use (torch has its own only from 2.12 on)."""

    def gen_fn_def(
        self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False
    ) -> str:
        """The head of the function: unpack, then clear the caller's list."""
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        lines = [f"def {self._func_name}(self, args_list){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = args_list")
        lines.append("    args_list.clear()")
        return "\n".join(lines)


def cotangent_sources(
    cotangents: Sequence[fx.Node], output: fx.Node, returned: Sequence[object]
) -> list[object]:
    """For each cotangent, the returned value whose gradient it is; `None` if torch does not say or
    it is the gradient of an updated input."""
    descriptions = list(output.meta.get("desc", ()))
    found: list[object] = []
    for node in cotangents:
        source = getattr(node.meta.get("desc"), "output", None)
        position = descriptions.index(source) if source in descriptions else None
        found.append(None if position is None else returned[position])
    return found


def pass_absent_gradients(outputs: object) -> None:
    """Let the compiled region behind `outputs` receive `None` for an output without a gradient,
    instead of zeros of its size (`set_materialize_grads` on its autograd node)."""
    for node in region_nodes(outputs):
        node.set_materialize_grads(False)


def region_nodes(outputs: object) -> Iterator[Any]:
    """The autograd node of the compiled region behind each of its outputs."""
    for output in pytree.tree_leaves(outputs):
        node: Any = output.grad_fn if isinstance(output, torch.Tensor) else None
        for _ in range(4):  # An output that is a view is a few autograd nodes further.
            if node is None:
                break
            if type(node).__name__ == "CompiledFunctionBackward":
                yield node
                break
            node = node.next_functions[0][0] if node.next_functions else None


def uncompiled_operations(outputs: object, inputs: object, *, behind_regions: bool) -> int:
    """Number of operations outside compiled regions that autograd has recorded between a model's
    inputs and its outputs; `behind_regions`: also those whose results a region reads."""
    seen = {leaf.grad_fn for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
    waiting = [leaf.grad_fn for leaf in pytree.tree_leaves(outputs)
               if isinstance(leaf, torch.Tensor)]
    count = 0
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_region = type(node).__name__ == "CompiledFunctionBackward"
        if behind_regions or not is_region:
            waiting += [following for following, _ in node.next_functions]
        count += not (is_region or type(node).__name__ == "AccumulateGrad")
    return count
