"""Plans from their files; `planner.plans.writing` is the other way.

Reading checks every field and the fingerprint, so that a file cut short or edited by hand is
refused with the field's path, what was expected and what came.

Blind spot: the fingerprint guards the ops and tensors that the plan was made for, not the numbers
that were predicted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import msgspec

from apply.recipe import OpKey, Recipe, RegionRecipe, RunAgain, Store
from planner.errors import PlanFileError
from planner.plans.decisions import Decision
from planner.plans.document import SCHEMA_VERSION, DecisionRow, Document, OpRow, pick
from planner.plans.older import OLDER_VERSIONS, completed, from_older
from planner.plans.plan import Plan
from planner.plans.reader import check_complete, read
from planner.plans.writing import dumps as dumps
from planner.plans.writing import fingerprint
from planner.plans.writing import to_dict as to_dict

EPILOGUE = "/update of mutated inputs#0"
"""End of the name of the one pseudo-op before which ops may run again; see
`graph_capture.joint_graph.lower.epilogue_name`, which cannot be asked here without importing
torch."""


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


def loads(text: str, *, name: str = "the text") -> Plan:
    """The plan whose file holds `text`; `name` stands for the file in errors."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{name} is no plan: expected JSON, got text that is none or is cut "
                            f"short ({error}); plan again and save to a new file") from None
    return from_dict(document, name=name)


def from_dict(document: object, *, name: str = "the document") -> Plan:
    """The inverse of `to_dict`; raises `PlanFileError` where the document is no plan."""
    version = read(document, _Version, name).schema_version
    if version in OLDER_VERSIONS:
        assert isinstance(document, dict)
        document = from_older(document)
    elif version != SCHEMA_VERSION:
        raise PlanFileError(f"{name} has schema_version {version}, expected {SCHEMA_VERSION}: "
                            "plan again with this version of checkpoint-planner, or read the file "
                            "with the version that wrote it")
    if isinstance(document, dict):
        document = completed(document)
    given = read(document, Document, name)
    check_complete(document, msgspec.to_builtins(given), name)
    plan = _plan_of(given)
    _check_consistency(plan, given.fingerprint, name)
    return plan


@dataclass(frozen=True, slots=True)
class _Version:
    """What tells how to read the rest of a document."""

    schema_version: int


def _plan_of(document: Document) -> Plan:
    """The inverse of `planner.plans.document.document_of`."""
    recipe = pick(
        Recipe, document, overrides=tuple(document.overrides.items()),
        regions=tuple(pick(RegionRecipe, row, forward=_keys(row.decisions),
                            backward=_keys(row.backward)) for row in document.regions))
    return pick(
        Plan, document, document.predicted, document.solver, recipe=recipe,
        solver=document.solver.name, created_with=tuple(document.created_with.items()),
        decisions=tuple(pick(Decision, row) for region in document.regions
                        for row in region.decisions), solve_seconds=None)


def _keys(rows: tuple[OpRow, ...] | tuple[DecisionRow, ...]) -> tuple[OpKey, ...]:
    return tuple(OpKey(row.op, row.digest, row.result) for row in rows)


def _check_consistency(plan: Plan, claimed_fingerprint: str, name: str) -> None:
    """Raise `PlanFileError` where fields are well formed but contradict each other."""
    expected = fingerprint(plan.recipe)
    if claimed_fingerprint != expected:
        raise PlanFileError(f"{name}: the fingerprint does not match the ops and tensors listed: "
                            f"expected {expected}, got {claimed_fingerprint}; the file was "
                            "changed after it was saved, plan again")
    again: dict[str, int] = {}
    away: set[str] = set()
    for region in plan.recipe.regions:
        here = {key.name for key in region.forward}
        known = here | {key.name for key in region.backward}
        for group in region.insertions:
            ops = [action.op for action in group.actions]
            away |= {action.op for action in group.actions if isinstance(action, Store)}
            unknown = [op for op in ops if op not in here]
            if group.before not in known and not group.before.endswith(EPILOGUE):
                unknown.append(group.before)
            if unknown:
                raise PlanFileError(f"{name}: an insertion names {unknown[0]!r}, which is no "
                                    "op of its region; the file was changed, plan again")
            for op in (each.op for each in group.actions if isinstance(each, RunAgain)):
                again[op] = again.get(op, 0) + 1
    for decision in plan.decisions:
        count = again.get(decision.op, 0)
        action = "recompute" if count else "offload" if decision.op in away else "keep"
        if decision.recomputations != count or decision.action != action:
            raise PlanFileError(f"{name}: op {decision.op!r} is recomputed {count} times by the "
                                f"list of insertions ({action!r}), but its decision says "
                                f"{decision.action!r}, {decision.recomputations} times; the file "
                                "was changed, plan again")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")
