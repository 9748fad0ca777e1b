"""The only access to private torch APIs; `requirements` lists them.

Names imported here are not covered by torch's compatibility promise.  Each entry says what it is
for; nothing else in the product touches a private name of torch.
"""

import planner._graph_capture.torch_compat.fake_kernels  # noqa: F401  puts fake kernels right
from planner._graph_capture.torch_compat.compilation import (
    AUTOGRAD_HOLDS_COTANGENTS as AUTOGRAD_HOLDS_COTANGENTS,
)
from planner._graph_capture.torch_compat.compilation import (
    BackendCompilerFailed as BackendCompilerFailed,
)
from planner._graph_capture.torch_compat.compilation import BoxedCodeGen as BoxedCodeGen
from planner._graph_capture.torch_compat.compilation import (
    HigherOrderOperator as HigherOrderOperator,
)
from planner._graph_capture.torch_compat.compilation import OpOverload as OpOverload
from planner._graph_capture.torch_compat.compilation import PartitionFunction as PartitionFunction
from planner._graph_capture.torch_compat.compilation import (
    TorchDynamoException as TorchDynamoException,
)
from planner._graph_capture.torch_compat.compilation import aot_backend as aot_backend
from planner._graph_capture.torch_compat.compilation import aten_name as aten_name
from planner._graph_capture.torch_compat.compilation import boxed as boxed
from planner._graph_capture.torch_compat.compilation import called_unseen as called_unseen
from planner._graph_capture.torch_compat.compilation import compile_forward as compile_forward
from planner._graph_capture.torch_compat.compilation import compile_module as compile_module
from planner._graph_capture.torch_compat.compilation import compile_settings as compile_settings
from planner._graph_capture.torch_compat.compilation import copied_module as copied_module
from planner._graph_capture.torch_compat.compilation import cotangent_sources as cotangent_sources
from planner._graph_capture.torch_compat.compilation import (
    eliminate_common_subexpressions as eliminate_common_subexpressions,
)
from planner._graph_capture.torch_compat.compilation import lookup_backend as lookup_backend
from planner._graph_capture.torch_compat.compilation import (
    pass_absent_gradients as pass_absent_gradients,
)
from planner._graph_capture.torch_compat.compilation import pytree as pytree
from planner._graph_capture.torch_compat.compilation import quiet_fake_tensors as quiet_fake_tensors
from planner._graph_capture.torch_compat.compilation import schema_of as schema_of
from planner._graph_capture.torch_compat.compilation import sharded_module as sharded_module
from planner._graph_capture.torch_compat.compilation import sizes_as_they_are as sizes_as_they_are
from planner._graph_capture.torch_compat.compilation import split_joint_graph as split_joint_graph
from planner._graph_capture.torch_compat.compilation import (
    uncompiled_operations as uncompiled_operations,
)
from planner._graph_capture.torch_compat.compilation import weakly as weakly
from planner._graph_capture.torch_compat.compilation import (
    wrapping_data_parallel as wrapping_data_parallel,
)
from planner._graph_capture.torch_compat.double_backward import (
    ForwardState as ForwardState,
)
from planner._graph_capture.torch_compat.double_backward import (
    differentiate_again as differentiate_again,
)
from planner._graph_capture.torch_compat.foreign_calls import has_global_hooks as has_global_hooks
from planner._graph_capture.torch_compat.foreign_calls import is_forward_mode as is_forward_mode
from planner._graph_capture.torch_compat.foreign_calls import is_traced as is_traced
from planner._graph_capture.torch_compat.foreign_calls import (
    is_under_transform as is_under_transform,
)
from planner._graph_capture.torch_compat.joint_inputs import PrimalSource as PrimalSource
from planner._graph_capture.torch_compat.joint_inputs import gradient_targets as gradient_targets
from planner._graph_capture.torch_compat.joint_inputs import mutated_inputs as mutated_inputs
from planner._graph_capture.torch_compat.joint_inputs import primal_sources as primal_sources
from planner._graph_capture.torch_compat.memory import FakeTensor as FakeTensor
from planner._graph_capture.torch_compat.memory import FakeTensorMode as FakeTensorMode
from planner._graph_capture.torch_compat.memory import GradientSums as GradientSums
from planner._graph_capture.torch_compat.memory import NoStaticShape as NoStaticShape
from planner._graph_capture.torch_compat.memory import TorchDispatchMode as TorchDispatchMode
from planner._graph_capture.torch_compat.memory import (
    UnsupportedOperatorException as UnsupportedOperatorException,
)
from planner._graph_capture.torch_compat.memory import active_modes as active_modes
from planner._graph_capture.torch_compat.memory import begin_stage as begin_stage
from planner._graph_capture.torch_compat.memory import bytes_made_before as bytes_made_before
from planner._graph_capture.torch_compat.memory import cpu_allocations as cpu_allocations
from planner._graph_capture.torch_compat.memory import (
    cpu_allocations_in_stages as cpu_allocations_in_stages,
)
from planner._graph_capture.torch_compat.memory import fake_tensor as fake_tensor
from planner._graph_capture.torch_compat.memory import hooks_of_gradient as hooks_of_gradient
from planner._graph_capture.torch_compat.memory import (
    hooks_of_whole_gradient as hooks_of_whole_gradient,
)
from planner._graph_capture.torch_compat.memory import is_functional as is_functional
from planner._graph_capture.torch_compat.memory import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from planner._graph_capture.torch_compat.memory import mark_as_parameter as mark_as_parameter
from planner._graph_capture.torch_compat.memory import next_node_number as next_node_number
from planner._graph_capture.torch_compat.memory import no_active_modes as no_active_modes
from planner._graph_capture.torch_compat.memory import (
    no_saved_tensors_hooks as no_saved_tensors_hooks,
)
from planner._graph_capture.torch_compat.memory import (
    no_subclass_functions as no_subclass_functions,
)
from planner._graph_capture.torch_compat.memory import of_class as of_class
from planner._graph_capture.torch_compat.memory import profiler_is_running as profiler_is_running
from planner._graph_capture.torch_compat.memory import running_node_number as running_node_number
from planner._graph_capture.torch_compat.memory import runs_in_backward as runs_in_backward
from planner._graph_capture.torch_compat.memory import runs_its_own_ops as runs_its_own_ops
from planner._graph_capture.torch_compat.memory import storage_at as storage_at
from planner._graph_capture.torch_compat.memory import storage_key as storage_key
from planner._graph_capture.torch_compat.memory import tensor_clone as tensor_clone
from planner._graph_capture.torch_compat.memory import (
    undisturbed_autograd as undisturbed_autograd,
)
from planner._graph_capture.torch_compat.optimizers import optimizers_as_on as optimizers_as_on
from planner._graph_capture.torch_compat.optimizers import (
    without_hooks_of_all_optimizers as without_hooks_of_all_optimizers,
)
from planner._graph_capture.torch_compat.plain_code import KNOWN_BYTES as KNOWN_BYTES
from planner._graph_capture.torch_compat.plain_code import Branch as Branch
from planner._graph_capture.torch_compat.plain_code import as_plain_code as as_plain_code
from planner._graph_capture.torch_compat.plain_code import branches_of as branches_of
from planner._graph_capture.torch_compat.plain_code import (
    has_discrete_values as has_discrete_values,
)
from planner._graph_capture.torch_compat.plain_code import may_be_known as may_be_known
from planner._graph_capture.torch_compat.symbols import backward_keeps_graph as backward_keeps_graph
from planner._graph_capture.torch_compat.symbols import expression_of as expression_of
from planner._graph_capture.torch_compat.symbols import function_of as function_of
from planner._graph_capture.torch_compat.symbols import (
    guards_hold as guards_hold,
)
from planner._graph_capture.torch_compat.symbols import marked_dimensions as marked_dimensions
from planner._graph_capture.torch_compat.symbols import same_sizes as same_sizes
from planner._graph_capture.torch_compat.symbols import smallest_value as smallest_value
from planner._graph_capture.torch_compat.symbols import symbolic_dimensions as symbolic_dimensions
from planner._graph_capture.torch_compat.symbols import text_of as text_of
