"""Plan files of older versions, brought to the present layout.

Version 5 had other names for some fields, and recomputations without a kind of action.
"""

from __future__ import annotations

from typing import Any

from planner.plans.document import FREE_FIELDS

_NAMES = {"early": "hoisted", "takeovers": "inplace_reuses", "recomputations": "insertions",
          "lean_backward": "low_peak", "ops": "actions"}
_NOT_RENAMED = (*FREE_FIELDS, "created_with", "decisions")


def from_version_5(document: Any) -> Any:
    """A document of version 5, or a part of it, in the layout of version 6; what is not as it
    should be stays, for the reader to name."""
    if isinstance(document, list):
        return [from_version_5(part) for part in document]
    if not isinstance(document, dict):
        return document
    found = {_NAMES.get(key, key): value if key in _NOT_RENAMED else from_version_5(value)
             for key, value in document.items()}
    if isinstance(document.get("ops"), list):
        found["actions"] = [{"kind": "run", "op": op} for op in document["ops"]]
    if "cotangents" in document:
        found["released"] = []
    if "schema_version" in document:
        found |= {"schema_version": 6, "circumstances": None, "course": None}
    return found
