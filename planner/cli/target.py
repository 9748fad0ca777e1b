"""TARGET of the command line: `package.module:factory`, `path/to/file.py:factory` or `hf:CONFIG`,
loaded as model, inputs and loss.

A factory is imported from the Python path and the current directory, or from its file, and called
without arguments.  It returns a model, or a model and its inputs, and the loss if the model does
not compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.cli.failures import TargetError, UsageError, describe_error
from planner.cli.loss import find_loss, fitted_to
from planner.cli.named_code import find_object
from planner.cli.options import TargetOptions
from planner.cli.tensors import parse_inputs

if TYPE_CHECKING:
    import torch
    from torch import nn

LossFn = Callable[[Any], "torch.Tensor"]


class Target(NamedTuple):
    """The target named on the command line."""

    model: nn.Module
    inputs: object
    """`None`: the model's own."""
    loss_fn: LossFn | None
    """`None` if the model computes its loss."""


def load_target(options: TargetOptions, *, device: str) -> Target:
    """Load the model, its inputs and its loss.

    `device`: of an `hf:` target and of the tensors of `--input`; `meta` allocates no memory. Raises
    `UsageError` if the target is malformed or does not exist, and `TargetError` if creating it
    fails.
    """
    given = find_loss(options.loss)
    if options.target.startswith("hf:"):
        from planner.cli.hugging_face import load_hugging_face

        known, batch = load_hugging_face(options, device=device)
        return Target(known, batch, fitted_to(given, batch))
    refuse_hf_options(options, "a factory sets its own sizes, or takes --input NAME:DTYPE[SHAPE]")
    model, inputs, loss_fn = call_factory(options.target, find_factory(options.target))
    if options.inputs:
        inputs = {name: spec.make(device) for name, spec in parse_inputs(options.inputs).items()}
    return Target(model, inputs, fitted_to(given, inputs) or loss_fn)


def refuse_hf_options(options: TargetOptions, remedy: str) -> None:
    """Raise `UsageError` for options that do not apply to a factory."""
    for flag, given in (("--set", options.settings), ("--batch", options.batch),
                        ("--seq", options.seq)):
        if given:
            raise UsageError(f"{flag} is for hf: targets; {remedy}")


def find_factory(target: str) -> Callable[..., Any]:
    """The object that `package.module:factory` names; raises `UsageError` and `TargetError`."""
    if not all(target.rpartition(":")):
        raise UsageError("TARGET must be package.module:factory, path/to/file.py:factory or "
                         f"hf:CONFIG, got {target!r}")
    found: Callable[..., Any] = find_object("TARGET", target)
    return found


def call_factory(target: str, factory: Any, *arguments: object) -> Target:
    """Call a factory and normalize its result."""
    from torch import nn

    if isinstance(factory, nn.Module):
        return Target(factory, None, None)
    if not callable(factory):
        raise UsageError(f"TARGET {target!r} is no function that makes a model, but "
                         f"{type(factory).__name__}")
    try:
        made = factory(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TargetError(f"the factory {target!r} failed: {describe_error(error)}") from error
    if isinstance(made, nn.Module):
        return Target(made, None, None)
    if isinstance(made, Sequence) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        model, inputs, loss_fn = (*made, None)[:3]
        if loss_fn is None or callable(loss_fn):
            return Target(model, inputs, loss_fn)
    got = (f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple | list)
           else type(made).__name__)
    raise TargetError(f"the factory {target!r} must return a model, (model, inputs) or (model, "
                      f"inputs, loss_fn), where loss_fn(output) gives the loss; got {got}")
