"""The user's code by name: `package.module:name`, from the Python path and the current directory,
or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.cli.failures import TargetError, UsageError, describe_error


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
