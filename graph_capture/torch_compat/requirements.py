"""Which private names of torch this package stands on, and how it calls them.

Each module of this folder calls `require` before it imports any of them: where torch has no such
name, or one that cannot be called so, that gives one error that names it.  A torch that is not
known is tried, not refused.  Blind spots: a name that is there and means something else, and
attributes of objects that torch makes, are seen only by the tests.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import torch

from graph_capture.errors import UnsupportedTorch

KNOWN_TO_WORK = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The whole suite passed with these; see docs/torch_versions.md."""

REQUIRED: dict[str, tuple[str, ...]] = {
    "compilation": (
        "torch._dynamo.backends.common.aot_autograd(fw_compiler=, bw_compiler=, "
        "inference_compiler=, partition_fn=)",
        "torch._dynamo.config.accumulated_recompile_limit",
        "torch._dynamo.config.automatic_dynamic_shapes",
        "torch._dynamo.config.ignore_logging_functions",
        "torch._dynamo.config.optimize_ddp",
        "torch._dynamo.config.patch",
        "torch._dynamo.config.recompile_limit",
        "torch._dynamo.config.suppress_errors",
        "torch._dynamo.exc.BackendCompilerFailed",
        "torch._dynamo.exc.TorchDynamoException",
        "torch._dynamo.lookup_backend(name)",
        "torch._functorch._aot_autograd.descriptors.GradAOTOutput(grad_of=)",
        "torch._functorch._aot_autograd.descriptors.InputMutationAOTOutput(mutated_input=)",
        "torch._functorch._aot_autograd.descriptors.PlainAOTInput(idx=)",
        "torch._functorch.compile_utils.fx_graph_cse(graph)",
        "torch._functorch.config.debug_assert",
        "torch._functorch.config.donated_buffer",
        "torch._functorch.config.enable_autograd_cache",
        "torch._functorch.config.patch",
        "torch._functorch.partitioners._extract_fwd_bwd_modules("
        "joint, saved, sizes, num_fwd_outputs=)",
        "torch._ops.HigherOrderOperator",
        "torch._ops.OpOverload",
        "torch.fx.graph.CodeGen.gen_fn_def(self, variables, annotation, expanded_def=)",
        "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()",
        "torch.utils._pytree.tree_flatten(tree)",
        "torch.utils._pytree.tree_leaves(tree)",
        "torch.utils._pytree.tree_map(function, tree)",
        "torch.utils._pytree.tree_map_only(kind, function, tree)",
        "torch.utils._pytree.tree_unflatten(leaves, structure)",
    ),
    "inductor": (
        "torch._functorch.config.activation_memory_budget",
        "torch._functorch.config.patch",
        "torch._functorch.partitioners.min_cut_rematerialization_partition("
        "joint, inputs, compiler=, num_fwd_outputs=)",
        "torch._inductor.async_compile.AsyncCompile()",
        "torch._inductor.codecache.PyCodeCache.write(text)",
        "torch._inductor.codegen.cpp.CppScheduling.codegen_node(self, node)",
        "torch._inductor.codegen.cpp.OuterLoopFusedSchedulerNode",
        "torch._inductor.codegen.cpp.TilingSelect._select_tiling_indices",
        "torch._inductor.compile_fx.compile_fx(graph, inputs, inner_compile=, config_patches=)",
        "torch._inductor.compile_fx.compile_fx_inner(graph, inputs)",
        "torch._inductor.config.cpp_wrapper",
        "torch._inductor.config.custom_partitioner_fn",
        "torch._inductor.config.fx_graph_cache",
        "torch._inductor.config.fx_graph_remote_cache",
        "torch._inductor.config.patch",
        "torch._inductor.config.size_asserts",
        "torch._inductor.cpp_builder.get_cpp_compiler()",
        "torch._inductor.custom_graph_pass.CustomPartitionerFn",
        "torch._inductor.exc.InvalidCxxCompiler",
        "torch._inductor.graph.GraphLowering.codegen(self)",
        "torch._inductor.graph.GraphLowering.compile_to_module(self)",
        "torch._inductor.graph.GraphLowering.decide_layout_opt(graph, is_inference=)",
        "torch._inductor.graph.GraphLowering.find_nodes_prefer_channels_last(self)",
        "torch._inductor.lowering.constrain_to_fx_strides",
        "torch._inductor.lowering.lowerings",
        "torch._inductor.lowering.make_fallback(op, layout)",
    ),
    "joint_replay": (
        "torch._functorch.aot_autograd.aot_stage1_graph_capture(state, function)",
        "torch._functorch.aot_autograd.run_functionalized_fw_and_collect_metadata",
        "torch._guards.TracingContext(fake_mode)",
        "torch._guards.detect_fake_mode(inputs)",
        "torch._guards.tracing(context)",
        "torch._inductor.compile_fx._recursive_joint_graph_passes(graph)",
    ),
    "kernel_order": (
        "torch._inductor.config._pre_fusion_custom_pass",
        "torch._inductor.custom_graph_pass.CustomPassBase",
        "torch._inductor.dependencies.WeakDep(name, mutating_buf, is_fake=)",
        "torch._inductor.scheduler.Scheduler.compute_ancestors(self)",
        "torch._inductor.virtualized.V",
    ),
    "memory": (
        "torch.Tensor._use_count",
        "torch.UntypedStorage._cdata",
        "torch._C.DisableTorchFunctionSubclass",
        "torch._C.TensorBase.clone",
        "torch._C._construct_storage_from_data_pointer",
        "torch._C._current_autograd_node",
        "torch._C._profiler._ExperimentalConfig",
        "torch._C._storage_Use_Count",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.FakeTensor.__new__(cls, mode, meta, device)",
        "torch._subclasses.fake_tensor.FakeTensorMode()",
        "torch.autograd.DeviceType.CPU",
        "torch.autograd.ProfilerConfig",
        "torch.autograd.ProfilerState.KINETO",
        "torch.autograd._disable_profiler",
        "torch.autograd._enable_profiler",
        "torch.autograd._get_sequence_nr",
        "torch.autograd._prepare_profiler",
        "torch.autograd._profiler_enabled",
        "torch.utils._python_dispatch.TorchDispatchMode()",
        "torch.utils._python_dispatch._disable_current_modes()",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack()",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)",
    ),
    "process_memory": (
        "torch._C._profiler._EventType.Allocation",
    ),
}
"""By module: names, with the call that is made of them where torch says what it takes: arguments
by position, then those by keyword (`name=`)."""


def require(module: str) -> None:
    """Raise `UnsupportedTorch` unless this torch has what the module of this folder (`__name__`)
    stands on; it is imported for that."""
    problems = [problem for requirement in REQUIRED[module.rpartition(".")[2]]
                if (problem := _problem(requirement))]
    if problems:
        raise UnsupportedTorch(
            f"checkpoint-planner needs internals of torch that torch {torch.__version__} does not "
            f"have as they are needed: {'; '.join(problems)}. Known to work: torch "
            f"{', '.join(KNOWN_TO_WORK)}. Install one of these "
            f"(pip install torch=={KNOWN_TO_WORK[-1]}) or a newer checkpoint-planner.")


def _problem(requirement: str) -> str:
    """What is wrong with a private name, in words; empty if nothing."""
    name, called, arguments = requirement.partition("(")
    try:
        found = _resolve(name)
    except (ImportError, AttributeError) as error:
        return f"{name} is missing ({error})"
    try:
        signature = inspect.signature(found) if called else None
    except ValueError:  # A builtin, or made by C++, that does not tell.
        signature = None
    if signature is None:
        return ""
    names = [argument for argument in arguments.rstrip(")").split(", ") if argument]
    by_keyword = {argument[:-1]: None for argument in names if argument.endswith("=")}
    try:
        signature.bind(*names[:len(names) - len(by_keyword)], **by_keyword)
    except TypeError as error:
        return f"{name} is called with ({arguments}, but takes {signature} ({error})"
    return ""


def _resolve(name: str) -> Any:
    """The object of a dotted name, whose modules are imported as needed."""
    found: Any = torch
    parts = name.split(".")
    for position, part in enumerate(parts[1:], start=2):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = importlib.import_module(".".join(parts[:position]))
        else:
            found = getattr(found, part)
    return found
