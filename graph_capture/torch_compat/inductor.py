"""Private names of Inductor: its compilation pipeline, its partitioner's hook, its generated code.

Imported only if a step is planned for or run by Inductor: loading it takes seconds.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from planner._graph_capture.torch_compat.recurrent import recurrent_layers_trained
from planner._graph_capture.torch_compat.requirements import require

require(__name__)

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch import partitioners
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.cpp import CppScheduling, OuterLoopFusedSchedulerNode, TilingSelect
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.graph import GraphLowering
from torch._inductor.loop_body import MemoryUsageType as Use
from torch._inductor.lowering import constrain_to_fx_strides, lowerings, make_fallback
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V

from planner._graph_capture.torch_compat.compilation import OpOverload, PartitionFunction, boxed

CompileGraph = Callable[[fx.GraphModule, Sequence[Any], bool], Callable[[list[Any]], Any]]
"""`compile(graph, example_inputs, is_backward)` gives a callable whose argument is a list."""
FinishGraph = Callable[[list[Any], Any, bool], Any]
"""`finish(inputs, compiled, is_backward)` gives the callable, of a list of arguments, that runs in
place of `compiled`; `inputs` are fake, as the partitioner left them."""


class JointPartitioner(CustomPartitionerFn):
    """`torch._inductor.config.custom_partitioner_fn` for one function.

    Inductor hashes `uuid()` into the keys of its caches, and pickles its configuration with this
    object; only the `uuid` is pickled.
    """

    def __init__(self, partition: PartitionFunction | None, uuid: str) -> None:
        self._partition = partition
        self._uuid = uuid

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
                 ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split `gm`, the joint graph after Inductor's joint passes."""
        if self._partition is None:
            raise RuntimeError("this partitioner was unpickled; it only stands for its uuid")
        return self._partition(gm, joint_inputs, **options)

    def uuid(self) -> str:
        """Key in the compilation caches."""
        return self._uuid

    def __reduce__(self) -> tuple[Any, ...]:
        return JointPartitioner, (None, self._uuid)


def inductor_backend(
    partition: PartitionFunction, uuid: str, *, compile_graph: CompileGraph | None = None,
    finish: FinishGraph | None = None, settings: Mapping[str, Any] | None = None,
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A Dynamo backend: Inductor with another partitioner.

    `compile_graph` replaces the compilation of the forward and backward graphs, whose result
    Inductor caches otherwise.  `finish` receives the compiled code, and may wrap it.  `settings`
    are entries of `torch._inductor.config`.
    """
    patches = {"custom_partitioner_fn": JointPartitioner(partition, uuid), **(settings or {})}

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        is_backward = bool(options.get("is_backward", False))
        if compile_graph is not None:
            return boxed(compile_graph(gm, example_inputs, is_backward))
        partitioned = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        with _unused_inputs_unchecked(gm):
            compiled = compile_fx.compile_fx_inner(gm, example_inputs, **options)
        return compiled if finish is None else finish(partitioned, compiled, is_backward)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with recurrent_layers_trained(module, fused=False):
            compiled: Any = compile_fx.compile_fx(
                module, list(inputs), inner_compile=inner_compile, config_patches=patches)
        return compiled

    return backend


@contextlib.contextmanager
def _unused_inputs_unchecked(gm: fx.GraphModule) -> Iterator[None]:
    """Inside, code does not look at the layout and address of inputs that it does not use: a
    gradient that does not exist is passed as `None`."""
    inputs = gm.graph.find_nodes(op="placeholder")
    used = {place for place, node in enumerate(inputs) if node.users}
    settings = {} if len(used) == len(inputs) else {"size_asserts": False}
    find = compile_fx.get_input_idxs_to_check

    def find_used(*args: Any, **kwargs: Any) -> list[int]:
        return [place for place in find(*args, **kwargs) if place in used]

    with (mock.patch.object(compile_fx, "get_input_idxs_to_check", find_used),
          inductor_config.patch(settings)):
        yield


def declare_fallback(op: OpOverload) -> None:
    """Tell Inductor in advance to call an op as it is, with operands in the graph's order of
    strides unless the op is tagged to accept any.  Otherwise Inductor learns only when it meets the
    op that its operands must be in memory, and the first graph's code differs from all later
    ones."""
    if op not in lowerings:
        takes_any = torch.Tag.flexible_layout in op.tags
        make_fallback(op, None if takes_any else constrain_to_fx_strides)


class _Chosen(BaseException):
    """Raised once the choices of torch's partitioner are known."""


def chosen_by_default(joint: fx.GraphModule, num_forward_outputs: int
                      ) -> tuple[fx.Graph, list[fx.Node]]:
    """The nodes that torch's own partitioner would save, and their graph; the backward may not read
    all of them.  Nodes keep their names in `joint`, which is used up.

    The partitioner stops before it splits the graph, which takes longer than the choice.
    """
    chosen: list[tuple[fx.Graph, list[fx.Node]]] = []

    def note(module: fx.GraphModule, saved_values: Sequence[fx.Node], *_: Any, **__: Any) -> Any:
        chosen.append((module.graph, list(saved_values)))
        raise _Chosen

    with (functorch_config.patch(activation_memory_budget=1.0),
          mock.patch.object(partitioners, "_extract_fwd_bwd_modules", note),
          contextlib.suppress(_Chosen)):
        partitioners.min_cut_rematerialization_partition(
            joint, (), compiler="inductor", num_fwd_outputs=num_forward_outputs)
    return chosen[0]


def store_result(node: fx.Node) -> None:
    """Make Inductor give the result of a node a buffer, in the layout of its trace."""
    node.meta[_STORED] = True


def is_stored(node: fx.Node) -> bool:
    """True if `store_result` was called for the node."""
    return _STORED in node.meta


_STORED = "inductor_realize_to_strides"


def missing_compiler(device: torch.device) -> str:
    """The requirement of Inductor for `device` that is missing; empty if none is."""
    if device.type != "cpu":
        return ""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return ""


def stub_of(compiled: Any) -> Callable[[list[Any]], Any]:
    """The generated code of a graph that Inductor compiled, with kernels that do nothing; it must
    run on fake tensors, in a list that it empties."""
    return _load_stub(compiled.source_code, "generated code", compiled.constants or {}).call


@contextlib.contextmanager
def stub_code(on_kernel: Callable[[KernelCall], None] | None = None,
              around: Callable[[], AbstractContextManager[object]] | None = None) -> Iterator[None]:
    """Inside, Inductor generates its code as usual, but compiles no kernel: the result allocates,
    frees and calls like the real code, and its own kernels do nothing.

    The code runs on fake tensors, also torch's own ops.  `on_kernel` receives the calls of
    Inductor's kernels, which are then generated as for a real run; without it, kernels for CPUs
    are only sketched.  `around` makes a context for each run of the code.
    """
    def compile_to_module(graph: GraphLowering) -> Any:
        code, _ = graph.codegen()
        text = code if isinstance(code, str) else code.value
        # The compiled graph needs a file of its source; the module is not registered under it.
        graph.cache_key, graph.cache_path = PyCodeCache.write(text)
        graph.cache_linemap = []
        module: Any = _load_stub(text, graph.cache_path, dict(graph.constants), on_kernel)
        if around is not None:
            module.call = _within(around, module.call)
        return module

    with (
        sketched_kernels() if on_kernel is None else contextlib.nullcontext(),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        # Inputs have no addresses to align, and those of layers that are left out are `None`.
        mock.patch.object(compile_fx, "get_input_idxs_to_check", lambda *args: []),
        # For logs only.
        mock.patch.object(fx.GraphModule, "print_readable", lambda *args, **options: ""),
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False,
                              cpp_wrapper=False, size_asserts=False, graph_partition=False),
    ):
        yield


def _within(around: Callable[[], AbstractContextManager[object]],
            function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        with around():
            return function(args)

    return call


@dataclass(frozen=True)
class Kernel:
    """A kernel of Inductor's, not compiled yet."""

    maker: str
    """The method of Inductor's `AsyncCompile` that compiles it."""
    source: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Text of everything that its code depends on."""
        return repr((self.maker, self.source, sorted(self.options.items())))

    def build(self) -> Callable[[], Any]:
        """Start its compilation; the result is a function that waits for the kernel."""
        built = getattr(AsyncCompile(), self.maker)(*self.source, **self.options)

        def wait() -> Any:
            found = built
            while hasattr(found, "result"):
                found = found.result()
            return found

        return wait


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel, with fake tensors."""

    kernel: Kernel
    method: str
    """The method that the generated code calls: `__call__`, or `run` (Triton)."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _NoKernel:
    """Replaces a compiled kernel: only reports its calls."""

    def __init__(self, kernel: Kernel | None = None,
                 on_call: Callable[[KernelCall], None] | None = None) -> None:
        self._kernel, self._on_call = kernel, on_call

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Report a call, as of kernels for CPUs."""
        self._tell("__call__", args, kwargs)

    def run(self, *args: object, **kwargs: object) -> None:
        """Report a call, as of Triton kernels."""
        self._tell("run", args, kwargs)

    def _tell(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._kernel is not None and self._on_call is not None:
            self._on_call(KernelCall(self._kernel, method, args, kwargs))


_KERNEL_MAKERS = ("triton", "cpp", "cpp_pybinding", "cuda", "cutlass", "halide", "metal",
                  "multi_kernel")


def _load_stub(text: str, path: str, constants: Mapping[str, Any],
               on_kernel: Callable[[KernelCall], None] | None = None) -> types.ModuleType:
    def stub(maker: str) -> Callable[..., _NoKernel]:
        # It replaces a method of the class, and is looked up on an instance.
        return lambda _, *source, **options: _NoKernel(Kernel(maker, source, options), on_kernel)

    module = types.ModuleType("generated_code")
    module.__file__ = path
    with contextlib.ExitStack() as stack:
        for maker in _KERNEL_MAKERS:
            if hasattr(AsyncCompile, maker):
                stack.enter_context(mock.patch.object(AsyncCompile, maker, stub(maker)))
        exec(compile(text, path, "exec"), module.__dict__)
    module.__dict__.update(constants)
    for name in list(module.__dict__):
        # These bypass the dispatcher, and so fake tensors.
        if name.startswith("empty_strided_"):
            module.__dict__[name] = _allocator(name.removeprefix("empty_strided_"))
        elif name.startswith("assert_"):  # Of addresses and layouts, which fake tensors lack.
            module.__dict__[name] = _NoKernel()
    module.__dict__["reinterpret_tensor"] = _reinterpret
    return module


def _allocator(device: str) -> Callable[..., torch.Tensor]:
    place = device.removesuffix("_pinned")

    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=place)

    return allocate


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int],
                 offset_increment: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset_increment)


_ADDED = "atomic_add"
"""The mode of a store that leaves the value unknown."""


@contextlib.contextmanager
def sketched_kernels() -> Iterator[None]:
    """Inside, kernels for CPUs are sketched; those of Triton are generated as usual.

    The scalar loops come first in any case, and decide what a kernel allocates and reuses.  The
    vectorization matters only where kernels share their outer loops.
    """
    generate, generate_loops = CppScheduling.codegen_node, SchedulerNode.codegen

    def scalar_loops(scheduling: Any, node: Any) -> None:
        if isinstance(node, OuterLoopFusedSchedulerNode):
            generate(scheduling, node)
            return
        with mock.patch.object(TilingSelect, "_select_tiling_indices", lambda *args: []):
            generate(scheduling, node)

    def loads_and_stores(node: Any, index_vars: Any) -> None:
        if node.get_device().type != "cpu" or not _told(node):
            generate_loops(node, index_vars)

    with (mock.patch.object(CppScheduling, "codegen_node", scalar_loops),
          mock.patch.object(SchedulerNode, "codegen", loads_and_stores)):
        yield


def _told(node: Any) -> bool:
    """Pass the loads and stores of a node to the kernel that is being generated; false if the node
    does more."""
    usage = node._body.memory_usage
    stores = [*usage[Use.STORE], *usage[Use.STORE_REDUCTION]]
    if usage[Use.BUCKETIZE] or any(entry.mode not in (None, _ADDED) for entry in stores):
        return False
    kernel, context = V.kernel, V.local_buffer_context
    local = getattr(context, "global_to_local", {})
    known = kernel.cse.store_cache

    def name_in_kernel(name: str) -> str:
        return local[name].get_name() if name in local else name

    for entry in (*usage[Use.LOAD], *usage[Use.LOAD_SEED]):
        name = name_in_kernel(entry.buffer_name)
        if name not in known:
            kernel.args.input(name)
    for entry in stores:
        name = name_in_kernel(entry.buffer_name)
        kernel.store_buffer_names.add(name)
        if entry.mode != _ADDED:
            known[name] = kernel.cse.newvar(dtype=V.graph.get_dtype(name))
            if name in V.graph.name_to_buffer:
                known.update(dict.fromkeys(node.get_output(name).get_mutations(), known[name]))
        if name not in V.graph.removed_buffers:
            kernel.args.output(name)
    return True
