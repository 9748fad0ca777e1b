"""Optimizers that step a model's parameters: those that have, and those that are seen to.

Two hooks of torch's are registered for the whole process, the first time that somebody asks; they
look at an optimizer once for each model that is watched.

Blind spots: optimizers that are not torch's, and those that update copies of the parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

if TYPE_CHECKING:
    from planner.attached.observing import ObservingForward

_observers: WeakSet[ObservingForward] = WeakSet()
_hooks: list[Any] = []


@dataclass(frozen=True, slots=True)
class ObservedOptimizer:
    """An optimizer that steps a model; equal to another one of the same settings for the same
    parameters, such as a loop makes for each task.  Called, it returns the optimizer or `None`."""

    instance: ref[Optimizer] = field(compare=False)
    kind: tuple[object, ...]

    @classmethod
    def of(cls, optimizer: Optimizer) -> ObservedOptimizer:
        """Look at an optimizer; learning rates may change."""
        groups = tuple(
            (tuple(map(id, group["params"])), tuple(
                (name, bool(value) if isinstance(value, float) else value)
                for name, value in group.items()
                if name != "lr" and isinstance(value, bool | int | float | str | None)))
            for group in optimizer.param_groups)
        return cls(ref(optimizer), (type(optimizer), groups))

    def __call__(self) -> Optimizer | None:
        return self.instance()


def observe(observer: ObservingForward) -> None:
    """Report all optimizer steps to `observer` while it is alive."""
    _observers.add(observer)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def optimizers_of(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """The optimizers that are there for some of the parameters, without those that another one of
    them has for its own use."""
    mine = {id(parameter) for parameter in parameters}
    found = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)
             and _updates(each, mine)]
    inner = {id(value) for each in found for value in vars(each).values()}
    return [each for each in found if id(each) not in inner]


def has_stepped(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """True if an optimizer has state of some of the parameters: in training that is resumed."""
    return not {*map(id, optimizer.state)}.isdisjoint(map(id, parameters))


def _updates(optimizer: Optimizer, parameters: Set[int]) -> bool:
    # A wrapper of another optimizer has that one's groups by a property, and none of its own.
    groups = vars(optimizer).get("param_groups", ())
    return any(id(each) in parameters for group in groups for each in group["params"])


def stop_observing(observer: ObservingForward) -> None:
    """Report no more steps to `observer`."""
    _observers.discard(observer)


def observers() -> list[ObservingForward]:
    """The observers that are alive."""
    return list(_observers)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for observer in observers():
        observer.stepping(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for observer in observers():
        observer.stepped(optimizer)
