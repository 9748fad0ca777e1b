"""Plans as JSON: canonical, so that equal plans give equal bytes and files diff well.

The layout is that of `planner.plans.document`, published with the package as `plan.schema.json`.
Objects have a fixed order of keys; lists of ops hold one op per line.  Nothing in a file depends on
when, where or how fast it was made: no timestamps, no host, no duration of the solver.

A file is written beside its destination and moved into place: readers see the old plan or the new
one.  Reading checks every field and the fingerprint, so that a file cut short or edited by hand is
refused with the field's path, what was expected and what came.

Blind spot: the fingerprint guards the ops and tensors that the plan was made for, not the numbers
that were predicted.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from apply.recipe import Recipe
from planner.errors import PlanFileError
from planner.plans.document import SCHEMA_VERSION, Document, document_of, plan_of
from planner.plans.older import from_version_5
from planner.plans.plan import Plan
from planner.plans.reader import check_complete, read
from planner.whole_file import write_whole

EPILOGUE = "/update of mutated inputs#0"
"""End of the name of the one moment that is no op and before which ops may run again; see
`graph_capture.joint_graph.lower.epilogue_name`, which cannot be asked here without importing
torch."""


def save(plan: Plan, path: str | PathLike[str]) -> None:
    """Write `plan` to `path`, all of it or nothing; an existing file is replaced.

    Raises `OSError` where the path cannot be written.
    """
    write_whole(path, dumps(plan).encode())


def load(path: str | PathLike[str]) -> Plan:
    """The plan in the file `path`.

    Raises `PlanFileError` for a file that holds no plan, or one of another schema version, and
    `OSError` for a file that cannot be read.
    """
    source = Path(path)
    try:
        return loads(source.read_text(encoding="utf-8"), name=str(source))
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{source} is no plan: expected JSON in UTF-8, got other bytes at "
                            f"position {error.start}; plan again and save to a new file") from None


def dumps(plan: Plan) -> str:
    """The text of the plan's file."""
    return _pretty(to_dict(plan)) + "\n"


def loads(text: str, *, name: str = "the text") -> Plan:
    """The plan whose file holds `text`; `name` stands for the file in errors."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{name} is no plan: expected JSON, got text that is none or is cut "
                            f"short ({error}); plan again and save to a new file") from None
    return from_dict(document, name=name)


def to_dict(plan: Plan) -> dict[str, Any]:
    """What the file holds, as JSON values in the file's order."""
    document = msgspec.to_builtins(document_of(plan, fingerprint(plan.recipe)))
    found: dict[str, Any] = json.loads(json.dumps(document))  # where tuples are lists
    return found


def from_dict(document: object, *, name: str = "the document") -> Plan:
    """The inverse of `to_dict`; raises `PlanFileError` where the document is no plan."""
    version = read(document, _Version, name).schema_version
    if version == 5:
        assert isinstance(document, dict)
        document = from_version_5(document)
    elif version != SCHEMA_VERSION:
        raise PlanFileError(f"{name} has schema_version {version}, expected {SCHEMA_VERSION}: "
                            "plan again with this version of checkpoint-planner, or read the file "
                            "with the version that wrote it")
    given = read(document, Document, name)
    check_complete(document, msgspec.to_builtins(given), name)
    plan = plan_of(given)
    _check_consistency(plan, given.fingerprint, name)
    return plan


@dataclass(frozen=True, slots=True)
class _Version:
    """What tells how to read the rest of a document."""

    schema_version: int


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


def _check_consistency(plan: Plan, claimed_fingerprint: str, name: str) -> None:
    """Raise `PlanFileError` where fields are well formed but contradict each other."""
    expected = fingerprint(plan.recipe)
    if claimed_fingerprint != expected:
        raise PlanFileError(f"{name}: the fingerprint does not match the ops and tensors listed: "
                            f"expected {expected}, got {claimed_fingerprint}; the file was "
                            "changed after it was saved, plan again")
    again: dict[str, int] = {}
    for region in plan.recipe.regions:
        here = {key.name for key in region.forward}
        known = here | {key.name for key in region.backward}
        for group in region.insertions:
            ops = [action.op for action in group.actions]
            unknown = [op for op in ops if op not in here]
            if group.before not in known and not group.before.endswith(EPILOGUE):
                unknown.append(group.before)
            if unknown:
                raise PlanFileError(f"{name}: an insertion names {unknown[0]!r}, which is no "
                                    "op of its region; the file was changed, plan again")
            for op in ops:
                again[op] = again.get(op, 0) + 1
    for decision in plan.decisions:
        count = again.get(decision.op, 0)
        if decision.recomputations != count or (decision.action == "recompute") != (count > 0):
            raise PlanFileError(f"{name}: op {decision.op!r} is recomputed {count} times by the "
                                f"list of insertions, but its decision says "
                                f"{decision.action!r}, {decision.recomputations} times; the file "
                                "was changed, plan again")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


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
