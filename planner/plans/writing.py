"""Plans as JSON: canonical, so that equal plans give equal bytes and files diff well.

The layout is that of `planner.plans.document`, published with the package as `plan.schema.json`.
Objects have a fixed order of keys; lists of ops hold one op per line.  Nothing in a file depends on
when, where or how fast it was made: no timestamps, no host, no duration of the solver.

A file is written beside its destination and moved into place: readers see the old plan or the new
one.
"""

from __future__ import annotations

import hashlib
import json
from os import PathLike
from typing import TYPE_CHECKING, Any

import msgspec

from apply.recipe import Recipe
from planner.plans.document import document_of
from planner.whole_file import write_whole

if TYPE_CHECKING:
    from planner.plans.plan import Plan


def save(plan: Plan, path: str | PathLike[str]) -> None:
    """Write `plan` to `path`, all of it or nothing; an existing file is replaced.

    Raises `OSError` where the path cannot be written.
    """
    write_whole(path, dumps(plan).encode())


def dumps(plan: Plan) -> str:
    """The text of the plan's file."""
    return _pretty(to_dict(plan)) + "\n"


def to_dict(plan: Plan) -> dict[str, Any]:
    """What the file holds, as JSON values in the file's order."""
    document = msgspec.to_builtins(document_of(plan, fingerprint(plan.recipe)))
    found: dict[str, Any] = json.loads(json.dumps(document))  # where tuples are lists
    return found


_OUTLINE = ("structure", "input_layout", "input_bytes", "storage_bytes")


def fingerprint(recipe: Recipe) -> str:
    """Hash of the graph that a recipe was made for, the same in every process.

    Covers names and digests of all ops, the cotangents, the sizes served, every parameter and
    buffer, and the mode; not what is recomputed.
    """
    graph = [
        [[key.name, list(key.shape), key.dtype, key.requires_grad] for key in recipe.tensors],
        [[region.block, list(region.cotangents), [[key.name, key.digest] for key in region.forward],
          [[key.name, key.digest] for key in region.backward],
          None if region.outline is None else {
              field: getattr(region.outline, field) for field in _OUTLINE},
          list(region.hoisted)]
         for region in recipe.regions],
        recipe.training,
        [list(override) for override in recipe.overrides],
    ]
    text = json.dumps(graph, ensure_ascii=True, separators=(",", ":"))
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
    """Whether an object belongs on one line: an op, a tensor or a group of recomputations."""
    return "op" in value or "before" in value or "shape" in value or "kind" in value


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
