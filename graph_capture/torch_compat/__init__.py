"""The only access to private torch APIs; `requirements` lists them.

Names imported here are not covered by torch's compatibility promise.  Each entry says what it is
for; nothing else in the product touches a private name of torch.
"""

import planner._graph_capture.torch_compat.fake_kernels  # noqa: F401  puts fake kernels right
from planner._graph_capture.torch_compat.compilation import (
    AUTOGRAD_HOLDS_COTANGENTS as AUTOGRAD_HOLDS_COTANGENTS,
    BackendCompilerFailed as BackendCompilerFailed,
    BoxedCodeGen as BoxedCodeGen,
    HigherOrderOperator as HigherOrderOperator,
    OpOverload as OpOverload,
    PartitionFunction as PartitionFunction,
    TorchDynamoException as TorchDynamoException,
    aot_backend as aot_backend,
    aten_name as aten_name,
    before_double_backward as before_double_backward,
    boxed as boxed,
    called_unseen as called_unseen,
    compile_forward as compile_forward,
    compile_module as compile_module,
    compile_settings as compile_settings,
    copied_module as copied_module,
    cotangent_sources as cotangent_sources,
    eliminate_common_subexpressions as eliminate_common_subexpressions,
    lookup_backend as lookup_backend,
    pass_absent_gradients as pass_absent_gradients,
    pytree as pytree,
    quiet_fake_tensors as quiet_fake_tensors,
    schema_of as schema_of,
    sharded_module as sharded_module,
    sizes_as_they_are as sizes_as_they_are,
    split_joint_graph as split_joint_graph,
    uncompiled_operations as uncompiled_operations,
    weakly as weakly,
    wrapping_data_parallel as wrapping_data_parallel,
)
from planner._graph_capture.torch_compat.foreign_calls import (
    has_global_hooks as has_global_hooks,
    is_forward_mode as is_forward_mode,
    is_traced as is_traced,
    is_under_transform as is_under_transform,
)
from planner._graph_capture.torch_compat.joint_inputs import (
    PrimalSource as PrimalSource,
    gradient_targets as gradient_targets,
    mutated_inputs as mutated_inputs,
    primal_sources as primal_sources,
)
from planner._graph_capture.torch_compat.memory import (
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    GradientSums as GradientSums,
    NoStaticShape as NoStaticShape,
    TorchDispatchMode as TorchDispatchMode,
    UnsupportedOperatorException as UnsupportedOperatorException,
    active_modes as active_modes,
    begin_stage as begin_stage,
    bytes_made_before as bytes_made_before,
    cpu_allocations as cpu_allocations,
    cpu_allocations_in_stages as cpu_allocations_in_stages,
    fake_tensor as fake_tensor,
    hooks_of_gradient as hooks_of_gradient,
    hooks_of_whole_gradient as hooks_of_whole_gradient,
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
    mark_as_parameter as mark_as_parameter,
    next_node_number as next_node_number,
    no_active_modes as no_active_modes,
    no_saved_tensors_hooks as no_saved_tensors_hooks,
    no_subclass_functions as no_subclass_functions,
    of_class as of_class,
    profiler_is_running as profiler_is_running,
    running_node_number as running_node_number,
    runs_in_backward as runs_in_backward,
    runs_its_own_ops as runs_its_own_ops,
    storage_at as storage_at,
    storage_key as storage_key,
    tensor_clone as tensor_clone,
    undisturbed_autograd as undisturbed_autograd,
)
from planner._graph_capture.torch_compat.optimizers import optimizers_as_on as optimizers_as_on
from planner._graph_capture.torch_compat.plain_code import (
    KNOWN_BYTES as KNOWN_BYTES,
    Branch as Branch,
    as_plain_code as as_plain_code,
    branches_of as branches_of,
    has_discrete_values as has_discrete_values,
    may_be_known as may_be_known,
)
from planner._graph_capture.torch_compat.symbols import (
    backward_keeps_graph as backward_keeps_graph,
    expression_of as expression_of,
    function_of as function_of,
    guards_hold as guards_hold,
    marked_dimensions as marked_dimensions,
    same_sizes as same_sizes,
    smallest_value as smallest_value,
    symbolic_dimensions as symbolic_dimensions,
    text_of as text_of,
)
