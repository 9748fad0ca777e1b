"""The trajectory of an optimizer that evaluates the model within its step, such as L-BFGS.

Such a step uses a closure (`optimizer.step(closure)`) and decides by values how often to call it
and what to remember.  The model of the world: the trajectory is that of the same optimizer, with
the same settings, on a convex quadratic so badly conditioned that it does not converge: no
iteration ends early, every line search succeeds, the history fills.  That is a small real run; the
values that its code asked for answer the same requests of a step on tensors without values.

Blind spots: a real run may stop a step early, and uses less memory then.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from planner._graph_capture.fake_copies.data_dependent_values import ValueRecorder
from planner._graph_capture.fake_copies.storage_less import Answer
from planner._graph_capture.torch_compat import no_active_modes, pytree

_VARIABLES = 512
"""Minimum of variables of the quadratic; L-BFGS without rounding would need as many iterations."""
_CONDITION = 1e8
_SCALE = 1e6
"""Scale of the quadratic's values: none of them looks small to a stopping rule."""


_MOST_EVALUATIONS = 2000
"""Limit of evaluations of the function until the state has stopped growing."""


def needs_closure(optimizer: Optimizer) -> bool:
    """True if `step` cannot be called without a closure."""
    closure = _closure_parameter(optimizer)
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_closure(optimizer: Optimizer) -> bool:
    """True if `step` can be called with a closure."""
    return _closure_parameter(optimizer) is not None


def _closure_parameter(optimizer: Optimizer) -> inspect.Parameter | None:
    return inspect.signature(type(optimizer).step).parameters.get("closure")


class OptimizerTrajectory:
    """The small real run; mutable, since it advances."""

    def __init__(self, optimizer: Optimizer) -> None:
        """`optimizer`: provides groups and settings; it is not touched."""
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
            kind: Any = type(optimizer)
            self._optimizer = kind(copies)
            total = sum(p.numel() for p in self._parameters)
            # Neighbours differ in curvature as much as any two.
            order = torch.randperm(total, generator=source)
            self._curvature = _SCALE * torch.logspace(
                0, -torch.log10(torch.tensor(_CONDITION)), total, dtype=torch.float64)[order]
        self.evaluations = 0
        """Number of evaluations of the function so far."""

    def steps(self) -> Iterator[list[Answer]]:
        """The values that the optimizer's code asks for, in order, in each step up to the first one
        that starts with the full state.

        Raises `ValueError` if the state grows without end.
        """
        before, now = -2, -1
        while before != now:
            if self.evaluations > _MOST_EVALUATIONS:
                raise ValueError("its state still grows after "
                                 f"{self.evaluations} evaluations of the model")
            yield self.step()
            before, now = now, self._state_bytes()

    def _state_bytes(self) -> int:
        leaves = pytree.tree_leaves(list(self._optimizer.state.values()))
        storages = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
                    for leaf in leaves if isinstance(leaf, torch.Tensor)}
        return sum(storages.values())

    def step(self) -> list[Answer]:
        """Run one step; returns the values that the optimizer's code asked for, in order."""
        recorder = ValueRecorder()
        with no_active_modes(), recorder:
            self._optimizer.step(self._evaluate)
        return [replace(answer, operands=None) for answer in recorder.values]  # of larger tensors

    def _evaluate(self) -> torch.Tensor:
        self.evaluations += 1
        with no_active_modes(), torch.no_grad():
            point = torch.cat([p.flatten() for p in self._parameters])
            slope = self._curvature * point
            for parameter, part in zip(self._parameters, slope.split(
                    [p.numel() for p in self._parameters]), strict=True):
                parameter.grad = part.view_as(parameter)
            return point.dot(slope) / 2
