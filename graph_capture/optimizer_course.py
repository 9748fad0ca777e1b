"""The course of an optimizer that evaluates the model within its step, as L-BFGS does.

Such a step takes a closure (`optimizer.step(closure)`) and decides by values how often to call it
and what to remember.  The model of the world: the course is that of the same optimizer, with the
same settings, on a convex quadratic so badly conditioned that it does not converge: no iteration
ends early, every line search succeeds, the history fills.  That is a small real run; what its code
was told of values, a step on tensors without values is told again.

Blind spots: a real run may stop a step early, and takes less then.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from graph_capture.hollow import VALUE_OPS
from graph_capture.torch_compat import no_active_modes

_VARIABLES = 512
"""Of the quadratic, at least; L-BFGS without rounding would need as many iterations."""
_CONDITION = 1e8
_SCALE = 1e6
"""Of the quadratic's values: none of them looks small to a stopping rule."""


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class Course:
    """The small real run; mutable, since it goes on."""

    def __init__(self, optimizer: Optimizer) -> None:
        """`optimizer`: whose groups and settings count; it is not touched."""
        groups = optimizer.param_groups
        count = sum(len(group["params"]) for group in groups)
        each = -(-_VARIABLES // max(count, 1))
        source = torch.Generator().manual_seed(0)

        def variable(parameter: torch.Tensor) -> torch.Tensor:
            shape = (each,) + (1,) * (parameter.dim() - 1) if parameter.dim() else ()
            return torch.randn(shape, generator=source, dtype=torch.float64)

        with no_active_modes():
            copies = [{**group, "params": [variable(p) for p in group["params"]]}
                      for group in groups]
            self._parameters = [p for group in copies for p in group["params"]]
            self._optimizer = type(optimizer)(copies)
            total = sum(p.numel() for p in self._parameters)
            # Neighbours differ in curvature as much as any two.
            order = torch.randperm(total, generator=source)
            self._curvature = _SCALE * torch.logspace(
                0, -torch.log10(torch.tensor(_CONDITION)), total, dtype=torch.float64)[order]
        self.evaluations = 0
        """How often the function was evaluated so far."""

    def step(self) -> list[Any]:
        """One step; the values that the optimizer's code asked for, in order."""
        answers = _Answers()
        with no_active_modes(), answers:
            self._optimizer.step(self._evaluate)
        return answers.given

    def _evaluate(self) -> torch.Tensor:
        self.evaluations += 1
        with no_active_modes(), torch.no_grad():
            point = torch.cat([p.flatten() for p in self._parameters])
            slope = self._curvature * point
            for parameter, part in zip(self._parameters, slope.split(
                    [p.numel() for p in self._parameters]), strict=True):
                parameter.grad = part.view_as(parameter)
            return point.dot(slope) / 2


class _Answers(TorchDispatchMode):
    """Notes the values of tensors that code asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Collection[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in VALUE_OPS:
            self.given.append(out)
        return out
