"""Load plans from files; `planner.plans.writing` saves them.

Reading checks every field, the fingerprint, and that the plan follows from its stated step and
schedule (`planner.plans.checking`).  A truncated or edited file is rejected with the field's path,
the expected and the given value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import msgspec

from planner._apply.rewrite_spec import OpKey, RegionSpec, RewriteSpec
from planner._graph_capture.training_graph import Phase, TrainingOp
from planner.errors import PlanFileError
from planner.plans.checking import contradiction
from planner.plans.document import SCHEMA_VERSION, Document, ops_of, pick
from planner.plans.plan import Plan
from planner.plans.reader import check_complete, check_values, read
from planner.plans.writing import dumps as dumps
from planner.plans.writing import fingerprint
from planner.plans.writing import to_dict as to_dict

_DRAFTS = range(2, 9)
"""Layout versions from before the first release, which are not read."""


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
        what = ("a draft from before the first release" if version in _DRAFTS
                else "which this version does not read")
        raise PlanFileError(f"{name} has schema_version {version}, {what}, expected "
                            f"{SCHEMA_VERSION}: plan again with this version of "
                            "checkpoint-planner and save to a new file")
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
            keys.setdefault((op.region, op.phase), []).append(_key(op))
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


def _key(op: TrainingOp) -> OpKey:
    return OpKey(op.name, op.digest, op.result)


def _changed(name: str, words: str) -> PlanFileError:
    return PlanFileError(f"{name}: {words}; the file was changed after it was saved, plan again")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field stands twice in one object")
    return found
