"""TARGET of the command line: `package.module:factory`, `path/to/file.py:factory` or `hf:CONFIG`,
loaded as model, inputs and loss.

A factory is imported from the Python path and the current directory, or from its file, and called
without arguments.  It returns a model, or a model and its inputs, and the loss if the model does
not compute it.  Commands that vary the size of the step call it with the size, `factory(32)`; the
model of the first call is used throughout, later calls provide inputs and loss only.

`--loss` names a function of the output, or one of `torch.nn.functional`, such as `cross_entropy`,
called with the model's prediction - the output's `logits`, else its first tensor - and a target of
matching shape.  Classes are the second dimension, as in torch; but if the model's inputs are token
sequences, or the output has `logits` of three dimensions, they are the last, and each position of
each sequence counts.

Blind spot: the target of such a loss is created as zeros within it, so it counts as the loss's
memory and not as an input.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.cli.options import TargetOptions, parse_inputs
from planner.cli.output import TargetError, UsageError, describe_error

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


def load_sized_target(options: TargetOptions, what: str, *, first: int) -> SizedTarget:
    """Load the model and a function from size to inputs; `what` varies, `batch` or `sequence`.

    `first`: the first size that a factory is called with.  An `hf:` target is on `meta`.  Raises
    `UsageError` and `TargetError` like `load_target`.
    """
    loss_fn = find_loss(options.loss)
    if options.target.startswith("hf:"):
        from planner.cli.hugging_face import load_sized_hugging_face

        return SizedTarget(*load_sized_hugging_face(options, what), loss_fn)
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


def find_object(what: str, text: str) -> Any:
    """Import the object that `package.module:name` or `path/to/file.py:name` names; `what`: the
    argument that names it.  Raises `UsageError` if it does not exist, and `TargetError` if its
    import fails."""
    module_name, _, path = text.rpartition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if module_name.endswith(".py"):
        if not Path(module_name).is_file():
            raise UsageError(f"{what} {text!r}: there is no file {Path(module_name).absolute()}")
    elif not all(module_name.split(".")) or os.sep in module_name:
        raise UsageError(f"{what} {text!r}: {module_name!r} is no name of a module; a file is "
                         "named with its ending, as in path/to/file.py:name")
    try:
        value: Any = (_from_file(Path(module_name).resolve()) if module_name.endswith(".py")
                      else importlib.import_module(module_name))
    except ModuleNotFoundError as missing:
        if missing.name and (module_name == missing.name
                             or module_name.startswith(missing.name + ".")):
            raise UsageError(f"{what} {text!r}: there is no module {missing.name!r} on the "
                             f"Python path or in {here}; a file is named with its ending, as in "
                             "path/to/file.py:name") from None
        raise TargetError(f"importing {module_name!r} failed: {missing}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TargetError(f"importing {module_name!r} failed: {describe_error(error)}") from error
    for name in path.split("."):
        if not hasattr(value, name):
            raise UsageError(f"{what} {text!r}: {module_name!r} has no {path!r}")
        value = getattr(value, name)
    return value


def _from_file(path: Path) -> ModuleType:
    """Import a file as a module, which may import modules of the same folder."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(
        path.stem if known is None else str(path), path)
    assert spec is not None and spec.loader is not None, "the file ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as for any import: classes are looked up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


OF_CLASSES = ("cross_entropy", "nll_loss")
"""Losses whose target is a class index."""
OF_VALUES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
             "binary_cross_entropy", "binary_cross_entropy_with_logits")
"""Losses whose target has the shape and dtype of the prediction."""


def find_loss(text: str | None) -> LossFn | None:
    """The loss function that `--loss` names; `None` for `None`.

    Raises `UsageError` and `TargetError` like `find_object`.
    """
    if text is None:
        return None
    if text in OF_CLASSES + OF_VALUES:
        return _FunctionalLoss(text)
    if ":" not in text:
        raise UsageError(f"--loss must be package.module:function, path/to/file.py:function, or "
                         f"one of {', '.join(OF_CLASSES + OF_VALUES)}; got {text!r}")
    found = find_object("--loss", text)
    if not callable(found):
        raise UsageError(f"--loss {text!r} is no function of the model's output, but "
                         f"{type(found).__name__}")
    loss: LossFn = found
    return loss


def fitted_to(loss: LossFn | None, inputs: object
              ) -> LossFn | None:
    """The loss of `find_loss`, adapted to a model with such inputs."""
    return _FunctionalLoss(loss.name, _has_tokens(inputs)) if isinstance(
        loss, _FunctionalLoss) else loss


def _has_tokens(inputs: object) -> bool:
    """True if the inputs contain integer sequences of shape `(batch, sequence)`."""
    import torch

    from planner._graph_capture.torch_compat import pytree

    return any(isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and leaf.dtype != torch.bool
               and not (leaf.is_floating_point() or leaf.is_complex())
               for leaf in pytree.tree_leaves(inputs))


class _FunctionalLoss:
    """A function of `torch.nn.functional`, with a target of zeros."""

    def __init__(self, name: str, of_tokens: bool = False) -> None:
        self.name, self._of_tokens = name, of_tokens

    def __call__(self, output: Any) -> torch.Tensor:
        """Compute the loss of the model's output."""
        import torch

        from planner._graph_capture.output_tensors import output_tensors

        logits = getattr(output, "logits", None)
        tensors = [logits] if isinstance(logits, torch.Tensor) else output_tensors(output)
        prediction = next((each for each in tensors if each.is_floating_point()), None)
        if prediction is None or prediction.dim() == 0:
            raise UsageError(
                f"--loss {self.name} is made of the output's `logits` or first tensor of floats; "
                f"the model returns {_described(output)}. Give --loss file.py:function, a function "
                "of the output" + ("" if prediction is None else
                                   ", or leave --loss out: a number is taken for the loss"))
        if self.name in OF_CLASSES:
            if prediction.dim() == 3 and (self._of_tokens or logits is not None):
                prediction = prediction.flatten(0, 1)
            # One class per position; a single sample has one position.
            place = prediction.select(1 if prediction.dim() > 1 else 0, 0)
            target = torch.zeros_like(place, dtype=torch.long)
        else:
            target = torch.zeros_like(prediction)
        loss: torch.Tensor = getattr(torch.nn.functional, self.name)(prediction, target)
        return loss


def _described(output: object) -> str:
    import torch

    return (f"a tensor of {str(output.dtype).removeprefix('torch.')}{list(output.shape)}"
            if isinstance(output, torch.Tensor) else type(output).__name__)
