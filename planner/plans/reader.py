"""Reading a JSON value as the types of `planner.plans.document`, or saying where it is none.

`msgspec` checks types.  What it leaves open is checked against what would be written: every field
is there, there is no other, and no whole number is below 0.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any, TypeVar

import msgspec

from planner.errors import PlanFileError
from planner.plans.document import FREE_FIELDS

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


def check_complete(value: Any, written: Any, name: str, path: tuple[str | int, ...] = ()) -> None:
    """Raise `PlanFileError` unless `value` holds what would be `written`, no more and no less."""
    steps = list(path)
    if isinstance(written, dict):
        for key in written:
            if key not in value:
                raise _missing(name, [*steps, key])
            if path or key not in FREE_FIELDS:
                check_complete(value[key], written[key], name, (*path, key))
        for key in value:
            if key not in written:
                raise PlanFileError(f"{name} is no plan: the field {_at([*steps, key])} is none "
                                    "of a plan; plan again and save to a new file")
    elif isinstance(written, list | tuple):
        for position, item in enumerate(written):
            check_complete(value[position], item, name, (*path, position))
    elif isinstance(value, int) and value < 0:
        raise PlanFileError(_expected(name, "a whole number >= 0", steps, value))


def _missing(name: str, steps: list[str | int]) -> PlanFileError:
    return PlanFileError(f"{name} is no plan: the field {_at(steps)} is missing; "
                         "plan again and save to a new file")


def _wrong(name: str, document: Any, steps: list[str | int]) -> PlanFileError:
    """The error for the value at a place, which is not what the published schema expects there."""
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
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return (f"{name} is no plan: expected {words} as {_at(steps) or 'the document'}, got {shown}; "
            "plan again and save to a new file")


def _at(steps: list[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}"
                   for step in steps).removeprefix(".")
