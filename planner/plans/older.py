"""Plan files of older versions, brought to the present layout.

Version 5 had other names for some fields, and recomputations without a type of action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REGION = {"early": "hoisted", "takeovers": "inplace_reuses", "recomputations": "insertions"}


def from_version_5(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document of version 5 in the layout of version 6; what is not as it should be stays, for
    the reader to name."""
    found = _renamed(document, {"lean_backward": "low_peak"})
    regions = found.get("regions")
    if isinstance(regions, list):
        found["regions"] = [_region(region) if isinstance(region, dict) else region
                            for region in regions]
    return {**found, "schema_version": 6}


def _region(region: Mapping[str, Any]) -> dict[str, Any]:
    found = _renamed(region, _REGION)
    groups = found.get("insertions")
    if isinstance(groups, list):
        found["insertions"] = [_insertion(group) if isinstance(group, dict) else group
                               for group in groups]
    return found


def _insertion(group: Mapping[str, Any]) -> dict[str, Any]:
    found = _renamed(group, {"ops": "actions"})
    if isinstance(found.get("actions"), list):
        found["actions"] = [{"kind": "run", "op": op} for op in found["actions"]]
    return found


def _renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in fields.items()}
