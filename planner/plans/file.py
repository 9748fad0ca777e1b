"""Load plans from files; `planner.plans.writing` saves them.

Reading checks every field, the fingerprint, and that the plan follows from its stated step and
schedule (`planner.plans.checking`).  A truncated or edited file is rejected with the field's path,
the expected and the given value.

`msgspec` checks types.  The remaining rules are checked against what would be written: every field
is present, there is no other, and no whole number is below 0.  Before that, every single value is
checked: numbers have 64 bits and are finite, texts are printable.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from planner._apply.rewrite_spec import OpKey, RegionSpec, RewriteSpec
from planner._graph_capture.training_graph import Phase
from planner.errors import PlanFileError
from planner.plans.checking import contradiction, shortened
from planner.plans.document import FREE_FIELDS, SCHEMA_VERSION, Document, ops_of, pick
from planner.plans.plan import Plan
from planner.plans.writing import dumps as dumps
from planner.plans.writing import fingerprint
from planner.plans.writing import to_dict as to_dict


def load(path: str | PathLike[str]) -> Plan:
    """Load the plan in the file `path`.

    Raises `PlanFileError` if the file does not contain a plan, or one of another schema version,
    and `OSError` if it cannot be read.
    """
    source = Path(path)
    try:
        return loads(source.read_text(encoding="utf-8"), name=str(source))
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{source} is no plan: expected JSON in UTF-8, got other bytes at "
                            f"position {error.start}; plan again and save to a new file") from None


def loads(text: str, *, name: str = "the text") -> Plan:
    """The plan with the file content `text`; `name` stands for the file in errors."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant,
                              object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{name} is no plan: expected JSON, got text that is none or is cut "
                            f"short ({error}); plan again and save to a new file") from None
    return from_dict(document, name=name)


def from_dict(document: object, *, name: str = "the document") -> Plan:
    """The inverse of `to_dict`; raises `PlanFileError` if the document is not a plan."""
    check_values(document, name)
    version = read(document, _Version, name).schema_version
    if version != SCHEMA_VERSION:
        raise PlanFileError(f"{name} has schema_version {version}, expected {SCHEMA_VERSION}: plan "
                            "again with this version of checkpoint-planner and save to a new file")
    given = read(document, Document, name)
    check_complete(document, msgspec.to_builtins(given), name)
    assert isinstance(document, dict), "it was read as a document"
    expected = fingerprint(document)
    if given.fingerprint != expected:
        raise _changed(name, f"the fingerprint does not match the rest of the file: expected "
                       f"{expected}, got {given.fingerprint}")
    plan = _plan_of(given)
    if words := contradiction(plan):
        raise _changed(name, words)
    return plan


@dataclass(frozen=True, slots=True)
class _Version:
    """The field that decides how to read the rest of a document."""

    schema_version: int


def _plan_of(document: Document) -> Plan:
    """The inverse of `planner.plans.document.document_of`."""
    ops = ops_of(document)
    keys: dict[tuple[int, Phase], list[OpKey]] = {}
    for op in ops:
        if op.digest:
            keys.setdefault((op.region, op.phase), []).append(pick(OpKey, op))
    spec = pick(
        RewriteSpec, document, overrides=tuple(document.overrides.items()), ops=ops, fits=None,
        regions=tuple(pick(RegionSpec, row,
                           forward=tuple(keys.get((number, Phase.FORWARD), ())),
                           backward=tuple(keys.get((number, Phase.BACKWARD), ())))
                      for number, row in enumerate(document.regions)))
    return pick(
        Plan, document, document.predicted, document.solver, spec=spec,
        solver=document.solver.name, created_with=tuple(document.created_with.items()),
        decisions=tuple(row for region in document.regions for row in region.decisions),
        solve_seconds=None)


def _changed(name: str, words: str) -> PlanFileError:
    return PlanFileError(f"{name}: {shortened(words, 600)}; the file was changed after it was "
                         "saved, plan again")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field stands twice in one object")
    return found


_Kind = TypeVar("_Kind")


def read(value: object, kind: type[_Kind], name: str) -> _Kind:
    """`value` as a `kind`; raises `PlanFileError` that names the file and the field's path."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        steps = [int(index) if index else key
                 for key, index in re.findall(r"\.?(\w+)|\[(\d+|\.\.\.)\]", place.rstrip("`"))
                 if index != "..."]
    missing = re.search("missing required field `(.*)`", what)
    raise _missing(name, [*steps, missing[1]]) if missing else _wrong(name, value, steps)


_DEEPEST = 64
"""Limit on levels of nesting; plans stay far below it."""
_LARGEST = 2 ** 63 - 1
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters other than a new line, and surrogates."""
_MARKUP = re.compile(r"\[/[^\[\]]*\]")
"""A closing tag of rich, which prints plans."""


def check_values(document: object, name: str) -> None:
    """Raise `PlanFileError` for a number, text or nesting that no plan contains, at any depth."""
    pending: list[tuple[Any, list[str | int]]] = []
    if isinstance(document, dict | list | tuple):  # anything else is refused as a document
        pending.append((document, []))
    while pending:
        value, steps = pending.pop()
        if len(steps) >= _DEEPEST and value:
            raise PlanFileError(f"{name} is no plan: it is nested deeper than {_DEEPEST} levels; "
                                "plan again and save to a new file")
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str) and (words := _why_no_text(key)):
                raise PlanFileError(_expected(name, words, steps, key))
            if isinstance(each, str):
                if words := _why_no_text(each):
                    raise PlanFileError(_expected(name, words, [*steps, key], each))
            elif isinstance(each, dict | list | tuple):
                pending.append((each, [*steps, key]))
            elif isinstance(each, int):
                if not -_LARGEST <= each <= _LARGEST:
                    raise PlanFileError(_expected(name, "a number of at most 64 bits",
                                                  [*steps, key], f"{each.bit_length()} bits"))
            elif isinstance(each, float) and not math.isfinite(each):
                raise PlanFileError(_expected(name, "a finite number", [*steps, key], each))


def _why_no_text(text: str) -> str:
    """The kind of text expected in place of an unprintable one; empty if `text` is printable."""
    if _UNPRINTABLE.search(text):
        return "text without control characters and lone surrogates"
    return "text without markup" if _MARKUP.search(text) else ""


def check_complete(value: Any, written: Any, name: str, path: tuple[str | int, ...] = ()) -> None:
    """Raise `PlanFileError` unless an object or list has exactly the fields of `written`."""
    is_object = isinstance(written, dict)
    for key, inner in written.items() if is_object else enumerate(written):
        if is_object and key not in value:
            raise _missing(name, [*path, key])
        if not path and key in FREE_FIELDS:
            continue
        if isinstance(inner, dict | list | tuple):
            check_complete(value[key], inner, name, (*path, key))
        elif isinstance(value[key], int) and value[key] < 0:
            raise PlanFileError(_expected(name, "a whole number >= 0", [*path, key], value[key]))
    for key in value if is_object else ():
        if key not in written:
            raise PlanFileError(f"{name} is no plan: the field {_at([*path, key])} is none "
                                "of a plan; plan again and save to a new file")


def _missing(name: str, steps: list[str | int]) -> PlanFileError:
    return PlanFileError(f"{name} is no plan: the field {_at(steps)} is missing; "
                         "plan again and save to a new file")


def _wrong(name: str, document: Any, steps: list[str | int]) -> PlanFileError:
    """The error for a value that does not match the published schema."""
    schema = json.loads(files("planner").joinpath("plan.schema.json").read_text(encoding="utf-8"))

    def alternatives(node: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        options = node.get("anyOf", [])
        return [part for option in options for part in alternatives(option)] or [node]

    nodes, value = alternatives(schema), document
    for step in steps:
        inner = [node.get("items") if isinstance(step, int)
                 else node.get("properties", {}).get(step) for node in nodes]
        nodes = [part for node in inner if node for part in alternatives(node)]
        value = value[step]
    words = " or ".join(" or ".join(map(repr, node["enum"])) if "enum" in node else
                        _WORDS[node["type"]] for node in nodes)
    words += f" such as {nodes[0]['pattern']}" if "pattern" in nodes[0] else ""
    words += " of texts" if isinstance(nodes[0].get("additionalProperties"), dict) else ""
    return PlanFileError(_expected(name, words, steps, value))


_WORDS = {"object": "an object", "array": "a list", "string": "text", "boolean": "true or false",
          "integer": "a whole number >= 0", "number": "a number > -1", "null": "null"}


def _expected(name: str, words: str, steps: list[str | int], value: object) -> str:
    shown = shortened(ascii(value), 60)
    return (f"{name} is no plan: expected {words} as {_at(steps) or 'the document'}, got {shown}; "
            "plan again and save to a new file")


def _at(steps: list[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}"
                   for step in steps).removeprefix(".")
