"""Optimizers that step a model's parameters: those that have, and those that are seen to.

Two hooks of torch's are registered for the whole process, the first time that somebody asks; they
look at an optimizer once for each model that is watched.

Blind spots: optimizers that are not torch's, and those that update copies of the parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class StepObserver(Protocol):
    """Receives every optimizer step."""

    def stepping(self, optimizer: Optimizer) -> None:
        """Called before any optimizer steps."""

    def stepped(self, optimizer: Optimizer) -> None:
        """It has stepped."""


_observers: WeakSet[Any] = WeakSet()
_hooks: list[Any] = []


def observe(observer: StepObserver) -> None:
    """Report all optimizer steps to `observer` while it is alive."""
    _observers.add(observer)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def optimizers_with_state(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """The optimizers that have stepped some of the parameters before: in training that is resumed.
    """
    mine = {id(parameter) for parameter in parameters}
    # A wrapper of another optimizer has that one's state by a property, and is none of its own.
    return [found for found in gc.get_objects() if issubclass(type(found), Optimizer)
            and any(id(key) in mine for key in vars(found).get("state", ()))]


def stop_observing(observer: StepObserver) -> None:
    """Report no more steps to `observer`."""
    _observers.discard(observer)


def observers() -> list[Any]:
    """The observers that are alive."""
    return list(_observers)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for observer in observers():
        observer.stepping(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for observer in observers():
        observer.stepped(optimizer)
