"""The private names of torch that this package needs, and the calls it makes of them.

Before a module of this folder imports any of them, `require` is called: by the package for the
modules that it imports, by each other module for itself.  If torch lacks a name, or cannot be
called that way, one error names it.  An unknown torch is tried, not refused.  Blind spots: only the
tests detect a name with another meaning, and attributes of objects that torch makes.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import torch

from planner._graph_capture.errors import UnsupportedTorch

KNOWN_TO_WORK = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""docs/reference/torch_versions.md lists the tests that were run with each."""


def _of(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names)


REQUIRED: dict[str, tuple[str, ...]] = {
    "compilation": (
        "torch._dynamo.backends.common.aot_autograd("
        "fw_compiler=, bw_compiler=, inference_compiler=, partition_fn=)",
        "torch._dynamo.convert_frame.input_codes.seen",
        *_of("torch._dynamo.config", "accumulated_recompile_limit", "allow_empty_graphs",
             "allow_rnn", "assume_static_by_default", "automatic_dynamic_shapes",
             "ignore_logging_functions", "optimize_ddp", "patch", "recompile_limit",
             "skip_nnmodule_hook_guards", "suppress_errors"),
        "torch._dynamo.eval_frame._debug_get_cache_entry_list(code)",
        "torch._dynamo.eval_frame.reset_code(code)",
        "torch._dynamo.eval_frame.set_code_exec_strategy(code, strategy)",
        *_of("torch._dynamo.exc", "BackendCompilerFailed", "TorchDynamoException"),
        "torch._dynamo.exc.unimplemented(gb_type=, context=, explanation=, hints=)",
        "torch._dynamo.lookup_backend(name)",
        "torch._dynamo.output_graph.OutputGraph.create_proxy",
        "torch._dynamo.polyfills.builtins.enumerate.__torch_dynamo_polyfill__",
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase.maybe_has_backedge(self)",
        "torch._dynamo.variables.ConstantVariable.create(value)",
        "torch._dynamo.variables.base.VariableTracker.build(tx, value)",
        *_of("torch._dynamo.variables.builtin.BuiltinVariable", "call_range", "call_zip"),
        "torch._dynamo.variables.lists.TupleVariable",
        "torch._dynamo.variables.misc.GetAttrVariable.call_method(self, tx, name, args, kwargs)",
        *_of("torch._dynamo.variables.tensor", "SymNodeVariable", "TensorVariable"),
        "torch._dynamo.variables.tensor.TensorVariable.method___setitem__(self, tx, key, value)",
        "torch._dynamo.variables.torch.TorchInGraphFunctionVariable",
        "torch._dynamo.variables.user_defined.UserDefinedObjectVariable."
        "_supported_random_functions()",
        *_of("torch._dynamo.types", "FrameAction.DEFAULT", "FrameExecStrategy"),
        *_of("torch._functorch.config", "backward_pass_autocast", "debug_assert", "donated_buffer",
             "enable_autograd_cache", "patch"),
        *_of("torch._inductor.config", "fallback_random", "patch"),
        "torch._functorch.partitioners._extract_fwd_bwd_modules("
        "joint, saved, sizes, num_fwd_outputs=)",
        "torch._guards.TracingContext.try_get()",
        *_of("torch._ops", "HigherOrderOperator", "OpOverload"),
        *_of("torch.fx._lazy_graph_module", "_LazyGraphModule.force_recompile(module)",
             "_use_lazy_graph_module(flag)"),
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_expr",
        "torch.fx.graph.CodeGen.gen_fn_def(self, variables, annotation, expanded_def=)",
        *_of("torch.nn.Module", "_call_impl", "_compiled_call_impl"),
        "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()",
        *_of("torch.utils._pytree", "tree_flatten(tree)", "tree_leaves(tree)",
             "tree_map(function, tree)", "tree_map_only(kind, function, tree)",
             "tree_unflatten(leaves, structure)"),
    ),
    "dispatch": (
        *_of("torch._C", "DispatchKey.AutocastCPU", "DispatchKey.Autograd",
             "DispatchKey.CompositeImplicitAutograd", "DispatchKey.PythonDispatcher",
             "DispatchKeySet", "_dispatch_tls_is_dispatch_key_included",
             "_ExcludeDispatchKeyGuard", "_dispatch_get_registrations_for_dispatch_key",
             "_dispatch_has_kernel_for_dispatch_key", "_dispatch_get_all_op_names",
             "_get_cudnn_sdp_enabled", "_get_flash_sdp_enabled", "_get_math_sdp_enabled",
             "_get_mem_efficient_sdp_enabled", "_get_mkldnn_enabled", "_get_sdp_priority_order"),
        "torch.library.Library._destroy(self)",
        "torch._ops.OpOverload",
        "torch._decomp.decompositions.upsample_compute_output_size("
        "input_size, output_size, scale_factors)",
        *_of("torch.ops.aten.dropout.default", "_dispatch_cache", "_op_dk", "_overloadname",
             "_overloadpacket", "py_kernels"),
    ),
    "fake_kernels": (
        *_of("torch._decomp", "decomposition_table", "meta_table"),
        "torch._meta_registrations._create_grouped_mm_output_tensor(a, b, offsets, dtype)",
        "torch._prims_common.suggest_memory_format(x)",
        "torch._subclasses.fake_impls.op_implementations_dict",
        "torch.ops.aten._grouped_mm.default",
    ),
    "foreign_calls": (
        "torch._C._functorch.maybe_current_level()",
        "torch.autograd.forward_ad._current_level",
        "torch.fx._symbolic_trace.is_fx_symbolic_tracing()",
        "torch.fx.experimental.proxy_tensor.get_proxy_mode()",
        "torch.nn.modules.module._has_any_global_hook()",
    ),
    "inductor": (
        *_of("torch._functorch.config", "activation_memory_budget", "patch"),
        "torch._functorch.partitioners.min_cut_rematerialization_partition("
        "joint, inputs, compiler=, num_fwd_outputs=)",
        "torch._inductor.async_compile.AsyncCompile()",
        "torch._inductor.codecache.PyCodeCache.write(text)",
        *_of("torch._inductor.compile_fx",
             "compile_fx(graph, inputs, inner_compile=, config_patches=)",
             "compile_fx_inner(graph, inputs)",
             "get_input_idxs_to_check(inputs, static)"),
        *_of("torch._inductor.config", "cpp_wrapper", "custom_partitioner_fn", "fx_graph_cache",
             "fx_graph_remote_cache", "patch", "size_asserts"),
        "torch._inductor.cpp_builder.get_cpp_compiler()",
        "torch._inductor.custom_graph_pass.CustomPartitionerFn",
        "torch._inductor.exc.InvalidCxxCompiler",
        *_of("torch._inductor.graph.GraphLowering", "codegen(self)", "compile_to_module(self)"),
        *_of("torch._inductor.lowering", "constrain_to_fx_strides", "lowerings",
             "make_fallback(op, layout)"),
        *_of("torch._inductor.codegen.cpp", "CppScheduling.codegen_node(self, node)",
             "OuterLoopFusedSchedulerNode", "TilingSelect._select_tiling_indices"),
        "torch._inductor.loop_body.MemoryUsageType",
        "torch._inductor.scheduler.SchedulerNode.codegen(self, index_vars)",
        "torch._inductor.virtualized.V",
    ),
    "joint_replay": (
        *_of("torch._functorch.aot_autograd", "aot_stage1_graph_capture(state, function)",
             "run_functionalized_fw_and_collect_metadata"),
        *_of("torch._guards", "TracingContext(fake_mode)", "detect_fake_mode(inputs)",
             "tracing(context)"),
        "torch._inductor.compile_fx._recursive_joint_graph_passes(graph)",
    ),
    "symbols": (
        "torch._C._autograd._get_current_graph_task_keep_graph",
        *_of("torch._dynamo", "maybe_mark_dynamic(tensor, indices)"),
        *_of("torch.utils._sympy.functions", "CeilToInt", "FloorDiv", "IntTrueDiv",
             "Max"),
        "torch.utils._sympy.printers.PythonPrinter.doprint(self, expression)",
        *_of("torch.utils._sympy.symbol", "SymT.FLOAT", "symbol_is_type(symbol, kind)"),
    ),
    "joint_inputs": (
        *_of("torch._functorch._aot_autograd.descriptors", "GradAOTOutput(grad_of=)",
             "DifferentiableAOTInput", "ForwardTokenAOTOutput",
             "InputMutationAOTOutput(mutated_input=)", "PlainAOTInput(idx=)",
             "SubclassGetAttrAOTInput(base=, attr=)",
             "SubclassGetAttrAOTOutput(base=, attr=)"),
    ),
    "kept_numbers": (
        *_of("torch._dynamo.bytecode_transformation", "create_call_function(nargs, push_null)",
             "create_instruction(name)"),
        "torch._dynamo.exc.UnspecializeRestartAnalysis(restart_reason=)",
        *_of("torch._dynamo.side_effects.SideEffects", "__contains__(self, item)",
             "codegen_update_mutated(self, cg)", "is_empty(self)"),
        *_of("torch._dynamo.symbolic_convert.InstructionTranslatorBase", "_load_attr(self, attr)",
             "frame_summary(self)"),
        *_of("torch._dynamo.variables",
             "BuiltinVariable.call_function(self, translator, args, kwargs)",
             "ConstantVariable.create(value)",
             "TensorVariable.call_method(self, translator, name, args, kwargs)"),
        *_of("torch._dynamo.variables.base.VariableTracker", "reconstruct(self, codegen)",
             "visit(fn, value)"),
        *_of("torch._dynamo.variables.lazy.LazyVariableTracker", "is_realized(self)",
             "original_source(self)", "original_value(self)", "realize(self)"),
    ),
    "memory": (
        *_of("torch.Tensor", "_backward_hooks", "_is_zerotensor", "_make_subclass",
             "_post_accumulate_grad_hooks", "_use_count"),
        "torch.UntypedStorage._cdata",
        "torch._is_functional_tensor",
        "torch._ops.OpOverload",
        *_of("torch._C", "DisableTorchFunctionSubclass", "_construct_storage_from_data_pointer",
             "_current_autograd_node", "_current_graph_task_id", "_storage_Use_Count"),
        *_of("torch._C._autograd", "_pop_saved_tensors_default_hooks()",
             "_push_saved_tensors_default_hooks(pack, unpack)",
             "_top_saved_tensors_default_hooks(ignore_is_tracing)"),
        "torch._C.TensorBase.clone",
        *_of("torch._C._profiler", "_EventType.Allocation", "_ExperimentalConfig"),
        *_of("torch._subclasses.fake_tensor", "DataDependentOutputException",
             "DynamicOutputShapeException", "FakeTensorMode()", "UnsupportedOperatorException"),
        "torch._subclasses.fake_tensor.FakeTensor.__new__(cls, mode, meta, device)",
        *_of("torch.autograd", "ProfilerConfig", "_disable_profiler", "_enable_profiler",
             "_get_sequence_nr", "_prepare_profiler", "_profiler_enabled"),
        "torch.autograd.ProfilerState.KINETO",
        *_of("torch.utils._python_dispatch", "TorchDispatchMode()", "_disable_current_modes()",
             "_get_current_dispatch_mode_stack()", "is_traceable_wrapper_subclass(tensor)"),
    ),
    "optimizers": (
        "torch.optim.optimizer._get_capturable_supported_devices(supports_xla=)",
    ),
    "plain_code": (
        *_of("torch._dynamo.exc", "UnspecializeRestartAnalysis(restart_reason=)", "Unsupported"),
        "torch._dynamo.external_utils",
        *_of("torch._dynamo.symbolic_convert.InstructionTranslatorBase", "dispatch_table",
             "frame_summary(self)", "run(self)"),
        *_of("torch._dynamo.variables",
             "ConstantVariable.create(value)",
             "ConstantVariable.is_literal(value)",
             "SkipFunctionVariable.call_function(self, translator, args, kwargs)",
             "TensorVariable.as_proxy(self)",
             "TensorVariable.call_method(self, translator, name, args, kwargs)"),
        "torch._dynamo.variables.base.VariableTracker.build(translator, value)",
        "torch._dynamo.variables.builder.wrap_fx_proxy(translator, proxy)",
        "torch._dynamo.variables.functions.WrapperUserFunctionVariable.call_function("
        "self, translator, args, kwargs)",
        "torch._dynamo.variables.user_defined.UserDefinedObjectVariable(value)",
        "torch._dynamo.variables.torch.TorchInGraphFunctionVariable.call_function("
        "self, translator, args, kwargs)",
        "torch._utils",
        "torch.utils._pytree.tree_leaves(tree)",
    ),
    "varying_numbers": (
        *_of("torch._dynamo.config", "assume_static_by_default", "patch", "specialize_float"),
        "torch._dynamo.exc.TensorifyScalarRestartAnalysis(restart_reason=)",
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase._format_value("
        "self, fmt_spec, flags)",
        "torch._dynamo.variables.ConstantVariable.create(value)",
        "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()",
        *_of("torch._dynamo", "utils.is_int_specialization_case(value, source)",
             "variables.builder.is_int_specialization_case(value, source)"),
        *_of("torch._dynamo.variables.builder.VariableBuilder", "wrap_symfloat(self, value)",
             "wrap_symint(self, value, dynamism)"),
        "torch._dynamo.variables.tensor.SymNodeVariable",
        "torch._functorch._aot_autograd.graph_compile.tensorify_python_scalars",
        "torch.fx.experimental.symbolic_shapes.DimDynamic",
    ),
    "process_group": (
        "torch.distributed.distributed_c10d._get_default_store()",
    ),
    "recurrent": (
        *_of("torch._decomp.decompositions",
             "one_layer_lstm(inp, hidden, params, has_biases, reverse=)",
             "select_one_layer_lstm_function(input, hx, params)"),
        "torch._C._AutoDispatchBelowAutograd",
        "torch._C._get_mkldnn_enabled()",
        *_of("torch.ops.mkldnn", "_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"),
    ),
    "scheduler_pass": (
        *_of("torch._inductor.config", "_post_fusion_custom_pass", "_pre_fusion_custom_pass",
             "reorder_for_peak_memory"),
        "torch._inductor.codegen.cpp.OuterLoopFusedSchedulerNode(scheduler, nodes, depth)",
        "torch._inductor.custom_graph_pass.CustomGraphPass",
        "torch._inductor.dependencies.WeakDep(name, mutating_buf, is_fake=)",
        *_of("torch._inductor.ir", "Buffer.get_inputs_that_alias_output(buffer)",
             "Buffer.get_mutation_names(buffer)", "IRNode.has_tensor_output(node)"),
        "torch._inductor.memory.reorder_for_peak_memory(nodes, buffers, of_members, given, left)",
        *_of("torch._inductor.scheduler", "FusedSchedulerNode(scheduler, nodes)",
             "Scheduler.compute_ancestors(self)",
             "Scheduler.topological_sort_schedule(self, nodes)",
             "SchedulerBuffer.can_free(self)"),
        "torch._inductor.utils.get_dtype_size(dtype)",
        "torch._inductor.virtualized.V",
        "torch.utils._ordered_set.OrderedSet",
    ),
    "sharding": (
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state(self)",
    ),
}
"""Names by module, with their call where torch has a signature: arguments by position, then those
by keyword (`name=`)."""


def require(module: str) -> None:
    """Raise `UnsupportedTorch` unless this torch has the names that a module of this folder needs
    (its name or `__name__`); they are imported for that."""
    problems = [problem for requirement in REQUIRED[module.rpartition(".")[2]]
                if (problem := _problem(requirement))]
    if problems:
        raise UnsupportedTorch(
            f"checkpoint-planner needs internals of torch that torch {torch.__version__} does not "
            f"have as they are needed: {'; '.join(problems)}. Known to work: torch "
            f"{', '.join(KNOWN_TO_WORK)}. Install one of these "
            f"(pip install torch=={KNOWN_TO_WORK[-1]}) or a newer checkpoint-planner.")


def _problem(requirement: str) -> str:
    """Describe the fault of a private name; empty if there is none."""
    name, called, arguments = requirement.partition("(")
    try:
        found = _resolve(name)
    except (ImportError, AttributeError) as error:
        return f"{name} is missing ({error})"
    try:
        signature = inspect.signature(found) if called else None
    except ValueError:  # a builtin, or made by C++, without a signature
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
