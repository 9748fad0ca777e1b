"""TARGET for commands that vary the size of the step: a model, and a function from size to inputs.

A factory is called with the size, `factory(32)`, and returns `(model, inputs)` or `(model, inputs,
loss_fn)`.  The model of the first call is used throughout; later calls provide inputs and loss
only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.cli.failures import TargetError, UsageError
from planner.cli.loss import find_loss, fitted_to
from planner.cli.options import TargetOptions
from planner.cli.target import LossFn, Target, call_factory, find_factory, refuse_hf_options

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class SizedTarget:
    """The target named on the command line."""

    model: nn.Module
    make_inputs: Callable[[int], object]
    largest: int | None
    """The largest size that the model accepts, if known."""
    loss_fn: LossFn | None = None
    """The loss at any size; `None`: that of the factory, or of the model."""
    make_loss_fn: Callable[[int], LossFn] | None = None
    """The factory's loss by size; `None` if it returns none."""


def load_sized_target(options: TargetOptions, what: str, *, first: int,
                      device: str) -> SizedTarget:
    """Load the model and a function from size to inputs; `what` varies, `batch` or `sequence`.

    `first`: the first size that a factory is called with; `device`: for an `hf:` target.  Raises
    `UsageError` and `TargetError` like `load_target`.
    """
    loss_fn = find_loss(options.loss)
    if options.target.startswith("hf:"):
        from planner.cli.hugging_face import load_sized_hugging_face

        return SizedTarget(*load_sized_hugging_face(options, what, device=device), loss_fn)
    refuse_hf_options(options,
                      f"a factory is called with the {what} size and sets all others itself")
    factory = find_factory(options.target)
    if callable(factory) and not _takes_a_size(factory):
        raise UsageError(f"TARGET {options.target!r} must take the {what} size and return "
                         "(model, inputs): it is called as factory(32)")

    made: dict[int, Target] = {}  # the last one: inputs and loss are requested in turn

    def make(size: int) -> Target:
        if size not in made:
            target = call_factory(options.target, factory, size)
            if target.inputs is None:
                raise TargetError(
                    f"the factory {options.target!r} must return (model, inputs) here, inputs of "
                    "the size that it is called with; got a model alone")
            made.clear()
            made[size] = target
        return made[size]

    def make_loss_fn(size: int) -> LossFn:
        loss = make(size).loss_fn
        if loss is None:
            raise TargetError(f"the factory {options.target!r} returned a loss_fn before, and none "
                              f"for the size {size}")
        return loss

    target = make(first)
    own_loss = target.loss_fn is not None and loss_fn is None
    return SizedTarget(target.model, lambda size: make(size).inputs, None,
                       fitted_to(loss_fn, target.inputs), make_loss_fn if own_loss else None)


def _takes_a_size(factory: Callable[..., object]) -> bool:
    try:
        inspect.signature(factory).bind(1)
    except TypeError:
        return False
    except ValueError:  # no signature available
        return True
    return True
