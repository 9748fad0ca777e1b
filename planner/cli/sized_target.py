"""TARGET where the size of the step varies: a model, and a function from a size to its inputs.

A factory is called with the size, `factory(32)`, and returns `(model, inputs)`.  The model of the
first call is the one that is looked at; of later calls only the inputs are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.cli.failures import TargetError, UsageError
from planner.cli.options import TargetOptions
from planner.cli.target import call_factory, find_factory, refuse_hf_options

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class SizedTarget:
    """What the command line named."""

    model: nn.Module
    make_inputs: Callable[[int], object]
    largest: int | None
    """The largest size that the model takes, where that is known."""


def load_sized_target(options: TargetOptions, what: str, *, first: int,
                      device: str) -> SizedTarget:
    """The model, and its inputs by size; `what` varies, `batch` or `sequence`.

    `first`: the size that a factory is first called with; `device`: where an `hf:` target is made.
    Raises `UsageError` and `TargetError` as `load_target` does.
    """
    if options.target.startswith("hf:"):
        from planner.cli.hugging_face import load_sized_hugging_face

        return SizedTarget(*load_sized_hugging_face(options, what, device=device))
    refuse_hf_options(options,
                      f"a factory is called with the {what} size and sets all others itself")
    factory = find_factory(options.target)
    if callable(factory) and not _takes_a_size(factory):
        raise UsageError(f"TARGET {options.target!r} must take the {what} size and return "
                         "(model, inputs): it is called as factory(32)")

    def make(size: int) -> tuple[nn.Module, object]:
        model, inputs = call_factory(options.target, factory, size)
        if inputs is None:
            raise TargetError(f"the factory {options.target!r} must return (model, inputs) here, "
                              "inputs of the size that it is called with; got a model alone")
        return model, inputs

    model, inputs = make(first)
    return SizedTarget(model, lambda size: inputs if size == first else make(size)[1], None)


def _takes_a_size(factory: Callable[..., object]) -> bool:
    try:
        inspect.signature(factory).bind(1)
    except TypeError:
        return False
    except ValueError:  # no signature to look at
        return True
    return True
