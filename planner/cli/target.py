"""TARGET of the command line: `package.module:factory`, `path/to/file.py:factory` or `hf:CONFIG`,
loaded as model, inputs and loss.

A factory is imported from the Python path and the current directory, or from its file, and called
without arguments.  It returns a model, or a model and its inputs, and the loss if the model does
not compute it.  Commands that vary the size of the step resize these inputs, as
`planner.max_batch_size` does.

`--loss` names a function of the output.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.cli.failures import TargetError, UsageError, describe_error
from planner.cli.options import TargetOptions, parse_inputs

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
    longest: int | None = None
    """The longest sequence that the model accepts, if known."""


def load_target(options: TargetOptions, *, device: str) -> Target:
    """Load the model, its inputs and its loss.

    `device`: of an `hf:` target and of the tensors of `--input`; `meta` allocates no memory. Raises
    `UsageError` if the target is malformed or does not exist, and `TargetError` if creating it
    fails.
    """
    given = find_loss(options.loss)
    if options.target.startswith("hf:"):
        from planner.cli.hugging_face import load_hugging_face

        known, batch, longest = load_hugging_face(options, device=device)
        return Target(known, batch, given, longest)
    refuse_hf_options(options, "a factory sets its own sizes, or takes --input NAME:DTYPE[SHAPE]")
    model, inputs, loss_fn, _ = call_factory(options.target, find_factory(options.target))
    if options.inputs:
        inputs = {name: spec.make(device) for name, spec in parse_inputs(options.inputs).items()}
    return Target(model, inputs, given or loss_fn)


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


def call_factory(target: str, factory: Any) -> Target:
    """Call a factory and normalize its result."""
    from torch import nn

    if isinstance(factory, nn.Module):
        return Target(factory, None, None)
    if not callable(factory):
        raise UsageError(f"TARGET {target!r} is no function that makes a model, but "
                         f"{type(factory).__name__}")
    try:
        made = factory()
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


def find_loss(text: str | None) -> LossFn | None:
    """The loss function that `--loss` names; `None` for `None`.

    Raises `UsageError` and `TargetError` like `find_object`.
    """
    if text is None:
        return None
    if ":" not in text:
        raise UsageError("--loss must be package.module:function or path/to/file.py:function, a "
                         f"function of the model's output; got {text!r}")
    found = find_object("--loss", text)
    if not callable(found):
        raise UsageError(f"--loss {text!r} is no function of the model's output, but "
                         f"{type(found).__name__}")
    loss: LossFn = found
    return loss
