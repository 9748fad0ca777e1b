"""Private names of Inductor: its compilation pipeline, its partitioner's hook, its generated code;
torch 2.11 to 2.13.

Imported only where a step is planned for or run by Inductor: loading it takes seconds.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomPartitionerFn, CustomPassBase

from graph_capture.torch_compat.compilation import boxed

PartitionFunction = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
CompileGraph = Callable[[fx.GraphModule, Sequence[Any], bool], Callable[[list[Any]], Any]]
"""`compile(graph, example_inputs, is_backward)` gives a callable that takes a list of arguments."""
FinishGraph = Callable[[list[Any], Any, bool], Any]
"""`finish(inputs, compiled, is_backward)` gives what runs in the place of `compiled`, which takes a
list of arguments; `inputs` are fake, as the partitioner left them."""

__all__ = [
    "JointPartitioner",
    "Kernel",
    "KernelCall",
    "KernelOrder",
    "default_saved_names",
    "inductor_backend",
    "missing_compiler",
    "stub_code",
    "stub_of",
]


class JointPartitioner(CustomPartitionerFn):
    """`torch._inductor.config.custom_partitioner_fn` for one function (2.7 and later).

    Inductor hashes `uuid()` into the keys of its caches, and pickles its configuration, this object
    included; what is pickled is the `uuid` alone.
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
        """What the caches know it by."""
        return self._uuid

    def __reduce__(self) -> tuple[Any, ...]:
        return JointPartitioner, (None, self._uuid)


# Only a pass of the newer class lets Inductor cache; where torch has none, it is not looked for.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomPassBase)


class KernelOrder(_SchedulerPass):
    """`torch._inductor.config._pre_fusion_custom_pass`: kernels of the backward keep to the plan.

    What the backward recomputes depends on no gradient, so that Inductor may fuse it with the first
    kernel of the backward, or run it then, and all recomputed values would be alive at once.  Here
    it gets an ordering dependency on the last call of an external kernel that does depend on a
    gradient and comes before it: kernels are not fused across those anyway.

    `strict`: every kernel gets one on the last external kernel before it.  That takes less memory
    still, and more time: of two kernels that could be one, each then reads its operands.
    """

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._of_user = inductor_config._pre_fusion_custom_pass

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Add the dependencies to the scheduler's nodes, which are in the order of the graph; a
        pass that the user had set runs first."""
        return self._add_dependencies(self._of_user(nodes) if self._of_user else nodes)

    def _add_dependencies(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.dependencies import WeakDep
        from torch._inductor.virtualized import V

        if not V.graph.is_backward:
            return nodes
        dependent = {name for name in V.graph.graph_input_names if "tangents" in name}
        barrier = ""
        for node in nodes:
            made = node.get_buffer_names()
            depends = any(dep.name in dependent for dep in node.read_writes.reads)
            if barrier and made and (self._strict or not depends):
                # An op's name in the place of a mutated buffer: the dependency is for order alone.
                node.add_fake_dep(WeakDep(barrier, node.get_name(), is_fake=True))
            if depends:
                dependent.update(made)
            if node.is_extern() and made and (self._strict or depends):
                barrier = next(iter(made))
        V.graph.scheduler.compute_ancestors()
        return nodes

    def uuid(self) -> tuple[object, ...] | None:
        """What the caches know it by; to be changed with the code above.  `None`, for no caching,
        where the user's pass is a mere function."""
        mine = ("checkpoint-planner: order of kernels 1", self._strict)
        if self._of_user is None:
            return mine
        if not isinstance(self._of_user, CustomPassBase):
            return None
        return (*mine, self._of_user.uuid())


def inductor_backend(
    partition: PartitionFunction, uuid: str, *, compile_graph: CompileGraph | None = None,
    finish: FinishGraph | None = None, settings: Mapping[str, Any] | None = None,
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A Dynamo backend: Inductor with another partitioner.

    `compile_graph` stands in for the compilation of the forward and backward graphs, whose result
    is otherwise cached by Inductor; `finish` is shown what was compiled, and may wrap it;
    `settings` are entries of `torch._inductor.config`.
    """
    patches = {"custom_partitioner_fn": JointPartitioner(partition, uuid), **(settings or {})}

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        is_backward = bool(options.get("is_backward", False))
        if compile_graph is not None:
            return boxed(compile_graph(gm, example_inputs, is_backward))
        partitioned = _placeholder_values(gm)
        compiled = compile_fx_inner(gm, example_inputs, **options)
        return compiled if finish is None else finish(partitioned, compiled, is_backward)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, list(inputs), inner_compile=inner_compile,
                          config_patches=patches)

    return backend


def _placeholder_values(gm: fx.GraphModule) -> list[Any]:
    return [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]


def default_saved_names(joint: fx.GraphModule, num_forward_outputs: int,
                        activation_memory_budget: float = 1.0) -> list[str]:
    """Names of the nodes that torch's own partitioner would save; `joint` is used up.

    The min-cut partitioner keeps the names of the nodes that it copies, and appends what it saves
    to the outputs of the forward.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with functorch_config.patch(activation_memory_budget=activation_memory_budget):
        forward, _ = min_cut_rematerialization_partition(
            joint, (), compiler="inductor", num_fwd_outputs=num_forward_outputs)
    returned = forward.graph.output_node().args[0]
    return [node.name for node in returned[num_forward_outputs:] if isinstance(node, fx.Node)]


def missing_compiler(device: torch.device) -> str:
    """What Inductor needs for `device` and does not find; empty if nothing."""
    if device.type != "cpu":
        return ""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return ""


def stub_of(compiled: Any) -> Callable[[list[Any]], Any]:
    """The generated code of what Inductor compiled, with kernels that do nothing; it is to run on
    fake tensors, in a list that it empties."""
    return _load_stub(compiled.source_code, "generated code", compiled.constants or {}).call


@contextlib.contextmanager
def stub_code(on_kernel: Callable[[KernelCall], None] | None = None,
              around: Callable[[], AbstractContextManager[object]] | None = None) -> Iterator[None]:
    """Inside, Inductor generates its code as ever, but compiles no kernel: what it returns
    allocates, frees and calls as the real code does, and its own kernels do nothing.

    The code runs on fake tensors; calls of torch's own ops go to them.  `on_kernel` is told the
    calls of Inductor's kernels, which are then generated as for a real run; without it, kernels are
    only sketched.  Each run of the code takes place inside of what `around` makes.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering

    def compile_to_module(graph: GraphLowering) -> types.ModuleType:
        code, _ = graph.codegen()
        text = code if isinstance(code, str) else code.value
        # The compiled graph wants a file of its source; the module is not registered under it.
        graph.cache_key, graph.cache_path = PyCodeCache.write(text)
        graph.cache_linemap = []
        module = _load_stub(text, graph.cache_path, dict(graph.constants), on_kernel)
        if around is not None:
            module.call = _within(around, module.call)
        return module

    with (
        _without_vector_code() if on_kernel is None else contextlib.nullcontext(),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False,
                              cpp_wrapper=False, size_asserts=False),
    ):
        yield


def _within(around: Callable[[], AbstractContextManager[object]],
            function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        with around():
            return function(args)

    return call


@contextlib.contextmanager
def _without_vector_code() -> Iterator[None]:
    """Inside, kernels for CPUs are generated as plain loops.

    The plain loops come first in any case, and with them is decided what a kernel allocates and
    reuses.  Only where kernels share their outer loops does the vectorization matter.
    """
    from torch._inductor.codegen.cpp import CppScheduling, OuterLoopFusedSchedulerNode, TilingSelect

    generate = CppScheduling.codegen_node

    def plain(scheduling: Any, node: Any) -> None:
        if isinstance(node, OuterLoopFusedSchedulerNode):
            generate(scheduling, node)
            return
        with mock.patch.object(TilingSelect, "_select_tiling_indices", lambda *args: []):
            generate(scheduling, node)

    with mock.patch.object(CppScheduling, "codegen_node", plain):
        yield


@dataclass(frozen=True)
class Kernel:
    """A kernel of Inductor's, not compiled yet."""

    maker: str
    """The method of Inductor's `AsyncCompile` that compiles it."""
    source: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def text(self) -> str:
        """All that its code depends on."""
        return repr((self.maker, self.source, sorted(self.options.items())))

    def build(self) -> Callable[[], Any]:
        """Start to compile it; what is returned waits for the result."""
        from torch._inductor.async_compile import AsyncCompile

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
    """How the generated code calls it: `__call__`, or `run` (Triton)."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _NoKernel:
    """In place of a compiled kernel: does nothing but to tell of its calls."""

    def __init__(self, kernel: Kernel | None = None,
                 on_call: Callable[[KernelCall], None] | None = None) -> None:
        self._kernel, self._on_call = kernel, on_call

    def __call__(self, *args: object, **kwargs: object) -> None:
        """As kernels for CPUs are called."""
        self._tell("__call__", args, kwargs)

    def run(self, *args: object, **kwargs: object) -> None:
        """As Triton kernels are called."""
        self._tell("run", args, kwargs)

    def _tell(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._kernel is not None and self._on_call is not None:
            self._on_call(KernelCall(self._kernel, method, args, kwargs))


_KERNEL_MAKERS = ("triton", "cpp", "cpp_pybinding", "cuda", "cutlass", "halide", "metal",
                  "multi_kernel")


_CHECKS_OF_MEMORY = ("assert_size_stride", "assert_alignment")
"""What generated code calls to check tensors, and cannot on fake ones."""


def _load_stub(text: str, path: str, constants: Mapping[str, Any],
               on_kernel: Callable[[KernelCall], None] | None = None) -> types.ModuleType:
    from torch._inductor.async_compile import AsyncCompile

    def stub(maker: str) -> Callable[..., _NoKernel]:
        # A method in its class's place, but of no instance: it is looked up on one.
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
        # These bypass the dispatcher, and with it fake tensors.
        if name.startswith("empty_strided_"):
            module.__dict__[name] = _allocator(name.removeprefix("empty_strided_"))
    module.__dict__["reinterpret_tensor"] = _reinterpret
    for check in _CHECKS_OF_MEMORY:
        if check in module.__dict__:
            module.__dict__[check] = _NoKernel()
    return module


def _allocator(device: str) -> Callable[..., torch.Tensor]:
    place = device.removesuffix("_pinned")

    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=place)

    return allocate


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int],
                 offset_increment: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset_increment)
