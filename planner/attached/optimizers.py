"""Which optimizers step a model's parameters, seen as they do it.

Two hooks of torch's are registered for the whole process, the first time that somebody asks; they
look at an optimizer once for each model that is watched.

Blind spots: an optimizer that is none of torch's, and one that updates copies of the parameters.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class StepObserver(Protocol):
    """Who wants to know of steps."""

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer, of whatever parameters, is about to step."""

    def stepped(self, optimizer: Optimizer) -> None:
        """It has stepped."""


_observers: WeakSet[Any] = WeakSet()
_hooks: list[Any] = []


def observe(observer: StepObserver) -> None:
    """Tell `observer` of all steps of optimizers, as long as it is alive."""
    _observers.add(observer)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def observers() -> list[Any]:
    """Those that are told."""
    return list(_observers)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for observer in observers():
        observer.stepping(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for observer in observers():
        observer.stepped(optimizer)
