"""Plans as canonical JSON: equal plans have equal bytes, and files diff well.

The layout is that of `planner.plans.document`, published with the package as `plan.schema.json`.
Objects have a fixed order of keys; lists of ops have one op per line.  A file does not depend on
time, host or solver duration.

A file is written next to its destination and moved into place: readers see the old plan or the new
one.  The destination is the target of a symbolic link, and keeps its mode.  A device or a pipe is
written to directly.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from planner.plans.document import document_of

if TYPE_CHECKING:
    from planner.plans.plan import Plan


_ABANDONED_SECONDS = 3600
"""Age of a draft that no process is writing any more."""


def save(plan: Plan, path: str | PathLike[str]) -> None:
    """Write `plan` to `path` atomically; an existing file is replaced.

    Raises `OSError` if the path cannot be written.
    """
    content, mode = dumps(plan).encode(), None
    try:
        with suppress(FileNotFoundError):
            mode = os.stat(path).st_mode  # a link in /proc to a pipe has no path to resolve
        if mode is None and os.fspath(path).endswith(os.sep):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if mode is None or stat.S_ISREG(mode):
            _replace(Path(os.path.realpath(path)), content, mode)
        else:
            Path(path).write_bytes(content)  # raises for a folder
    except OSError as error:
        # The caller knows the destination, not the draft.
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None


def _replace(destination: Path, content: bytes, mode: int | None) -> None:
    """Write a draft with this mode and move it to the destination, and remove drafts of it that
    killed processes left."""
    of_destination = f".{hashlib.sha256(os.fsencode(destination.name)).hexdigest()[:16]}"
    draft = destination.with_name(f"{of_destination}.{secrets.token_hex(8)}.tmp")
    try:
        with draft.open("xb") as stream:
            if mode is not None:
                os.fchmod(stream.fileno(), stat.S_IMODE(mode))
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(destination)
    finally:
        draft.unlink(missing_ok=True)
    for left in destination.parent.glob(f"{of_destination}.*.tmp"):
        with suppress(OSError):  # gone, or another user's
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                left.unlink()


def dumps(plan: Plan) -> str:
    """The text of the plan's file."""
    return _pretty(to_dict(plan)) + "\n"


def to_dict(plan: Plan) -> dict[str, Any]:
    """The content of the file, as JSON values in the file's order."""
    document = msgspec.to_builtins(document_of(plan))
    found: dict[str, Any] = json.loads(json.dumps(document))  # converts tuples to lists
    found["fingerprint"] = fingerprint(found)
    return found


def fingerprint(document: Mapping[str, Any]) -> str:
    """Hash of all fields of a file except the fingerprint, the same in every process."""
    rest = {key: value for key, value in document.items() if key != "fingerprint"}
    text = json.dumps(rest, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with one scalar, one small object or one short list per line."""
    inner = indent + "  "
    if isinstance(value, dict) and value and not _is_row(value):
        fields = (f"{inner}{_compact(key)}: {_pretty(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list, str)) for item in value):
        return "[\n" + ",\n".join(f"{inner}{_pretty(item, inner)}" for item in value) + (
            f"\n{indent}]")
    return _compact(value)


def _is_row(value: dict[str, Any]) -> bool:
    """True if an object belongs on one line: an op, a tensor or a group of recomputations."""
    return any(key in value for key in ("op", "digest", "before", "shape", "kind", "call",
                                        "smallest", "dimension"))


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
