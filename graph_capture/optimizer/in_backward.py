"""Gradients that are used as they come: hooks of parameters that step an optimizer and free them.

The model of the world: once the gradient of a parameter is whole, its hook runs
(`register_post_accumulate_grad_hook`), allocates what the optimizer's step of this parameter takes,
and lets the gradient go.  So no two gradients are there at once, but for those that one region
hands over together.

Blind spots: a hook that keeps gradients of several parameters to use them together; state that the
optimizer makes in the first step counts as if it were there before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from planner._graph_capture.fake_copies.fake import FakeCopy
from planner._graph_capture.memory.tracker import Workspace
from planner._graph_capture.module_forward import removed_afterwards
from planner._graph_capture.optimizer.named import instances
from planner._graph_capture.optimizer.step import trace_optimizer_steps
from planner._graph_capture.rank import MakeBuffer, Wrapper
from planner._graph_capture.training_graph import Category

EarlyGradients = Mapping[str, int]
"""Names of the parameters whose gradients are used as they come -> the bytes that this allocates.
"""


class UsesGradients(Wrapper):
    """Uses and frees each gradient of these parameters when it is whole."""

    def __init__(self, early: EarlyGradients) -> None:
        self.early = self.frees = early

    @contextlib.contextmanager
    def attached(self, model: nn.Module, make: MakeBuffer) -> Iterator[None]:
        def use(parameter: torch.Tensor) -> None:
            if size_bytes := self.early[names[id(parameter)]]:
                make(size_bytes, Category.TEMPORARIES)  # and released at once
            parameter.grad = None

        parameters = [(name, parameter) for name, parameter in model.named_parameters()
                      if name in self.early and parameter.requires_grad]
        names = {id(parameter): name for name, parameter in parameters}
        hooks = [parameter.register_post_accumulate_grad_hook(use) for _, parameter in parameters]
        with removed_afterwards(hooks):
            yield


def early_gradients(optimizer: object, fake_copy: FakeCopy, workspace: Workspace) -> EarlyGradients:
    """All trainable parameters, and what the step of an optimizer takes for each: an instance,
    class or name, or several instances; `None`: nothing.

    Raises as `graph_capture.optimizer.step.trace_optimizer_steps`, and `ValueError` for an
    optimizer whose step evaluates the model.
    """
    given = instances(optimizer)
    found: dict[object, int] = {}
    early = {}
    for name, parameter in fake_copy.model.named_parameters():
        if not parameter.requires_grad:
            continue
        if optimizer is None:
            early[name] = 0
            continue
        # Groups of an instance may have other settings.
        group = None if given is None else _group_of(name, given, fake_copy)
        key = (parameter.shape, parameter.dtype, parameter.stride(), group)
        if key not in found:
            trace = trace_optimizer_steps(optimizer, fake_copy, with_gradient={name},
                                          workspace=workspace)
            if trace.evaluations:
                raise ValueError(f"optimizer_in_backward=True: a step of {trace.name} evaluates "
                                 "the model, which cannot be done in the backward")
            found[key] = trace.step_peak_bytes
        early[name] = found[key]
    return early


def _group_of(name: str, optimizers: tuple[torch.optim.Optimizer, ...], fake_copy: FakeCopy
              ) -> tuple[int, int] | None:
    """Numbers of the optimizer, and of its group, that hold a parameter of the fake copy's
    model."""
    fake = fake_copy.parameters[name]
    for number, optimizer in enumerate(optimizers):
        for position, group in enumerate(optimizer.param_groups):
            if any(fake_copy.fake_of.get(each) is fake for each in group["params"]):
                return number if len(optimizer.param_groups[0]["params"]) > 1 else -1, position
    return None
