"""Plan files of older versions, brought to the present layout.

Version 7 ran nothing in pieces and knew nothing of kernels and of what is reserved, and version 6
one rank only; it got `released`, `course` and `circumstances` on its way.  Version 5 had other
names for some fields, and recomputations without a kind of action.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from planner.plans.document import FREE_FIELDS, SCHEMA_VERSION
from planner.plans.predicted import Predicted

_NAMES = {"early": "hoisted", "takeovers": "inplace_reuses", "recomputations": "insertions",
          "lean_backward": "low_peak", "ops": "actions"}
_NOT_RENAMED = (*FREE_FIELDS, "created_with", "decisions")

OLDER_VERSIONS = (5, 6, 7)
"""Versions that are read."""


def from_older(document: dict[str, Any]) -> dict[str, Any]:
    """A document of an older version in the present layout; what is not as it should be stays, for
    the reader to name."""
    if document["schema_version"] == 5:
        document = _from_version_5(document)
    if document["schema_version"] < 7:
        document = {"circumstances": None, "course": None, **document, "parallel": None}
    regions = document.get("regions")
    if isinstance(regions, list):
        document = {**document, "regions": [
            {"released": [], **region, "unmade": []} if isinstance(region, dict) else region
            for region in regions]}
    predicted = document.get("predicted")
    if isinstance(predicted, dict):
        predicted = {**predicted, "reserved_bytes": None, "baseline_reserved_bytes": None}
    return {**document, "schema_version": SCHEMA_VERSION, "pieces": 1, "kernels": [],
            "budget_of": "allocated", "predicted": predicted}


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """A document of the present version with the fields that came to it later."""
    predicted = document.get("predicted")
    later = {field.name: field.default for field in fields(Predicted)
             if field.default is not MISSING}
    document = {"inner_pieces": 1, "holds_output": _holds_output(document.get("regions")),
                "lean_code": document.get("strict_order", False), **document}
    if "own_layouts" in document:  # as the field was called when it decided on layouts alone
        document["lean_code"] = document.pop("own_layouts")
    if isinstance(parallel := document.get("parallel"), dict):
        document = {**document, "parallel": {"requires_gradient_sync": True, **parallel}}
    return {**document, "predicted": {**later, **predicted}} if isinstance(predicted, dict) else (
        document)


def _holds_output(regions: Any) -> bool:
    """As files without the field say it: where the output is dropped, a region lets go of it."""
    return not (isinstance(regions, list) and any(
        isinstance(region, dict) and region.get("released") for region in regions))


def _from_version_5(document: Any) -> Any:
    """A document of version 5, or a part of it, in the layout of version 6."""
    if isinstance(document, list):
        return [_from_version_5(part) for part in document]
    if not isinstance(document, dict):
        return document
    found = {_NAMES.get(key, key): value if key in _NOT_RENAMED else _from_version_5(value)
             for key, value in document.items()}
    if isinstance(document.get("ops"), list):
        found["actions"] = [{"kind": "run", "op": op} for op in document["ops"]]
    return found
