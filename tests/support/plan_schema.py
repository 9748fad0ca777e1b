"""The published JSON Schema of a plan's file, generated from the types in `planner.plans.document`.

    python -m tests.support.plan_schema > planner/plan.schema.json

The description of a field is the docstring below it, there or in the class that it comes from.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

import msgspec

from planner._apply.rewrite_spec import RegionSpec, RewriteSpec
from planner._graph_capture.training_graph import TrainingOp
from planner.plans.document import Document, OpRow, RegionRow, SolverRow
from planner.plans.plan import Plan

SOURCES: dict[type, type] = {Document: RewriteSpec, OpRow: TrainingOp, RegionRow: RegionSpec,
                             SolverRow: Plan}
"""Classes that document the fields of a group."""


def schema() -> dict[str, Any]:
    """The JSON Schema of a plan's file."""
    made = msgspec.json.schema(Document)
    definitions: dict[str, Any] = made["$defs"]
    for kind in {kind.__name__: kind for kind in _types(Document)}.values():
        described = definitions[kind.__name__]
        described["description"] = _text(inspect.getdoc(kind) or "")
        described["required"] = list(described["properties"])
        described["additionalProperties"] = False
        texts = {**(_descriptions(Plan) if kind is Document else {}),
                 **_descriptions(SOURCES.get(kind, kind)), **_descriptions(kind)}
        for name, field in described["properties"].items():
            field.pop("default", None)
            field.update({"description": texts[name]} if name in texts else {})
    _count(made)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Plan of checkpoint-planner", **made}


def _types(kind: type) -> Iterator[type]:
    """The type and all types of its fields, recursively."""
    yield kind
    pending = list(get_type_hints(kind).values())
    while pending:
        hint = pending.pop()
        pending.extend(get_args(hint))
        if is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, msgspec.Struct)):
            yield from _types(hint)


def _descriptions(kind: type) -> dict[str, str]:
    """The docstring below each field of a class, including those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        if base.__module__.startswith("msgspec") or not get_type_hints(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and (
                    isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                found[field.target.id] = _text(str(below.value.value))
    return found


def _text(docstring: str) -> str:
    """The first paragraph, on one line."""
    return " ".join(docstring.split("\n\n")[0].split())


def _count(node: object) -> None:
    """Give every integer the minimum 0."""
    if isinstance(node, dict):
        if node.get("type") == "integer":
            node.setdefault("minimum", 0)
        for part in node.values():
            _count(part)
    elif isinstance(node, list):
        for part in node:
            _count(part)


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
