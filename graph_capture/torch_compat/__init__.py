"""The one door to private torch APIs, for torch 2.11 to 2.13.

What is imported here is not covered by torch's compatibility promise.  Each entry says what it is
for; nothing else in the project touches a private name of torch.
"""

from graph_capture.torch_compat.compilation import (
    BackendCompilerFailed,
    BoxedCodeGen,
    HigherOrderOperator,
    OpOverload,
    TorchDynamoException,
    aot_backend,
    compile_module,
    compile_settings,
    cotangent_sources,
    eliminate_common_subexpressions,
    gradient_targets,
    mutated_inputs,
    pass_absent_gradients,
    primal_indices,
    quiet_fake_tensors,
    split_joint_graph,
)
from graph_capture.torch_compat.memory import (
    FakeTensor,
    FakeTensorMode,
    GradientSums,
    NoStaticShape,
    cpu_allocations,
    fake_tensor,
    no_active_modes,
    no_subclass_functions,
    storage_at,
    storage_key,
    tensor_clone,
)

__all__ = [
    "BackendCompilerFailed",
    "BoxedCodeGen",
    "FakeTensor",
    "FakeTensorMode",
    "GradientSums",
    "HigherOrderOperator",
    "NoStaticShape",
    "OpOverload",
    "TorchDynamoException",
    "aot_backend",
    "compile_module",
    "compile_settings",
    "cotangent_sources",
    "cpu_allocations",
    "eliminate_common_subexpressions",
    "fake_tensor",
    "gradient_targets",
    "mutated_inputs",
    "no_active_modes",
    "no_subclass_functions",
    "pass_absent_gradients",
    "primal_indices",
    "quiet_fake_tensors",
    "split_joint_graph",
    "storage_at",
    "storage_key",
    "tensor_clone",
]
