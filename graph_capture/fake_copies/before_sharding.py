"""A view of a sharded model as it was before `fully_shard`, without data.

The model of the world: `fully_shard` replaces the class of a module by one with hooks, and its
parameters by shards whose global shape is that of the parameter.  Parameters that are currently
gathered are the originals.  Everything else of a module is the user's.  So the view is a tree of
modules of the former classes that shares all other attributes, and whose parameters have shapes
only.  Methods installed on a module (`register_fsdp_forward_method`, accelerate's autocast) are
bound to its view.

Blind spots: parameters that were not contiguous; shards that are also split by tensor parallelism.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn


def before_sharding(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The view of a model; `dtype`: the dtype in which floating-point parameters are gathered,
    `None`: their own."""
    return _View(dtype).module(model)


class _View:
    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.modules: dict[int, nn.Module] = {}
        self.parameters: dict[int, nn.Parameter] = {}

    def module(self, real: nn.Module) -> nn.Module:
        from planner._graph_capture.torch_compat.sharding import class_before, is_of_sharding

        if id(real) in self.modules:
            return self.modules[id(real)]
        view = self.modules[id(real)] = object.__new__(class_before(real))
        attributes: dict[str, Any] = {
            key: value for key, value in vars(real).items() if not is_of_sharding(key, None)}
        for key, value in attributes.items():
            if key.endswith("_hooks") and isinstance(value, dict):
                attributes[key] = type(value)(
                    (number, hook) for number, hook in value.items()
                    if not is_of_sharding("", getattr(hook, "hook", hook)))
            elif isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
                attributes[key] = MethodType(value.__func__, self.module(value.__self__))
        attributes["_parameters"] = {
            key: None if parameter is None else self.parameter(parameter)
            for key, parameter in real._parameters.items()}
        attributes["_modules"] = {
            key: None if child is None else self.module(child)
            for key, child in real._modules.items()}
        view.__dict__.update(attributes)
        return view

    def parameter(self, real: nn.Parameter) -> nn.Parameter:
        """The view of a parameter; a tied parameter has one view."""
        from planner._graph_capture.torch_compat.sharding import is_shard

        if id(real) not in self.parameters:
            floats = self.dtype if real.is_floating_point() else None
            if is_shard(real) or (floats and real.dtype != floats):
                data = torch.empty(real.shape, dtype=floats or real.dtype, device="meta")
                self.parameters[id(real)] = nn.Parameter(data, requires_grad=real.requires_grad)
            else:
                self.parameters[id(real)] = real
        return self.parameters[id(real)]
