"""TARGET of the command line: `package.module:factory` or `hf:CONFIG`, made into model and inputs.

A factory is imported from the Python path and the current directory, and called without arguments;
it returns a model, or a model and its inputs.  What it prints goes to stderr, so that the results
on stdout stay readable by programs.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from planner.cli.failures import TargetError, UsageError
from planner.cli.options import TargetOptions
from planner.cli.tensors import parse_inputs

if TYPE_CHECKING:
    from torch import nn


def load_target(options: TargetOptions, *, device: str) -> tuple[nn.Module, object]:
    """The model and its inputs (`None`: the model's own).

    `device`: where an `hf:` target and the tensors of `--input` are made; `meta` costs no memory.
    Raises `UsageError` where the target is badly written or does not exist, and `TargetError`
    where making it fails.
    """
    if options.target.startswith("hf:"):
        from planner.cli.hugging_face import load_hugging_face

        return load_hugging_face(options, device=device)
    refuse_hf_options(options, "a factory sets its own sizes, or takes --input NAME:DTYPE[SHAPE]")
    model, inputs = call_factory(options.target, find_factory(options.target))
    if options.inputs:
        tensors_on = "cpu" if device == "meta" else device
        inputs = {name: spec.make(tensors_on)
                  for name, spec in parse_inputs(options.inputs).items()}
    return model, inputs


def refuse_hf_options(options: TargetOptions, remedy: str) -> None:
    """Raise `UsageError` for an option that a factory has no use for."""
    for flag, given in (("--set", options.settings), ("--batch", options.batch),
                        ("--seq", options.seq)):
        if given:
            raise UsageError(f"{flag} is for hf: targets; {remedy}")


def find_factory(target: str) -> Callable[..., Any]:
    """What `package.module:factory` names; raises `UsageError` and `TargetError`."""
    module_name, separator, path = target.partition(":")
    if not separator or not module_name or not path:
        raise UsageError(f"TARGET must be package.module:factory or hf:CONFIG, got {target!r}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):
            value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name and (module_name == missing.name
                             or module_name.startswith(missing.name + ".")):
            raise UsageError(f"TARGET {target!r}: there is no module {missing.name!r} on the "
                             f"Python path or in {here}") from None
        raise TargetError(f"importing {module_name!r} failed: {missing}") from None
    except Exception as error:
        raise TargetError(f"importing {module_name!r} failed: {_describe(error)}") from error
    for name in path.split("."):
        if not hasattr(value, name):
            raise UsageError(f"TARGET {target!r}: {module_name!r} has no {path!r}")
        value = getattr(value, name)
    found: Callable[..., Any] = value
    return found


def call_factory(target: str, factory: Any, *arguments: object) -> tuple[nn.Module, object]:
    """The model and the inputs (`None`: the model's own) that a factory makes."""
    from torch import nn

    if isinstance(factory, nn.Module):
        return factory, None
    if not callable(factory):
        raise UsageError(f"TARGET {target!r} is no function that makes a model, but "
                         f"{type(factory).__name__}")
    try:
        with redirect_stdout(sys.stderr):
            made = factory(*arguments)
    except Exception as error:
        raise TargetError(f"the factory {target!r} failed: {_describe(error)}") from error
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, Sequence) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], made[1]
    raise TargetError(f"the factory {target!r} must return a model or (model, inputs), "
                      f"got {type(made).__name__}")


def _describe(error: BaseException) -> str:
    """Kind, text and place of an error in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename
           and not frame.filename.startswith("<frozen") and frame.filename != __file__
           and os.sep + "importlib" + os.sep not in frame.filename]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
