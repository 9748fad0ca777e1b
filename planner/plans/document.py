"""The layout of a plan's file, stated once: `planner.plans.writing` writes it, `planner.plans.file`
reads it, and `planner.plans.schema` makes the published JSON Schema of it.

A file holds the fields of a plan and of its recipe in groups, and the ops of the forward together
with what is decided about them.  Every field is required, there are no others, and every whole
number is a count: not below 0.  What a field means is said where it comes from (`SOURCES` of
`planner.plans.schema`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from apply.recipe import Circumstances, InplaceReuse, Insertion, ParameterKey, RegionRecipe
from graph_capture.training_graph import CodeMemory, KernelChoice, OptimizerMemory, Outline
from planner.arguments.parallel import DataParallel
from planner.plans.decisions import Decision
from planner.plans.predicted import Change, Predicted
from planner.step.course import StepCourse
from solvers.result import Status

if TYPE_CHECKING:
    from planner.plans.plan import Plan

SCHEMA_VERSION = 8
"""Layout that this version writes."""


@dataclass(frozen=True, slots=True)
class OpRow:
    """An op of the backward."""

    op: str
    result: str
    digest: str


@dataclass(frozen=True, slots=True)
class DecisionRow(Decision):
    """An op of the forward, and what the plan does with it."""

    result: str
    digest: str


@dataclass(frozen=True, slots=True)
class RegionRow:
    """A captured piece of the model."""

    block: str
    cotangents: tuple[bool, ...]
    decisions: tuple[DecisionRow, ...]
    backward: tuple[OpRow, ...]
    insertions: tuple[Insertion, ...]
    inplace_reuses: tuple[InplaceReuse, ...]
    outline: Outline | None
    hoisted: tuple[int, ...]
    code: tuple[CodeMemory, ...]
    released: tuple[int, ...]
    unmade: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SolverRow:
    """What found the plan, and what is proven of it."""

    name: str
    status: Status
    overhead_bound: Change


@dataclass(frozen=True, slots=True)
class Document:
    """What to keep and what to recompute in one training step of a PyTorch model."""

    schema_version: Annotated[int, msgspec.Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    created_with: Annotated[dict[str, str], msgspec.Meta(
        extra_json_schema={"required": ["checkpoint-planner", "torch"]})]
    fingerprint: Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
    """Hash of ops, tensors, cotangents and mode; not of what is recomputed."""
    device: str
    backend: str
    cost_model: str
    parallel: DataParallel | None
    training: bool
    inputs: Any
    circumstances: Circumstances | None
    overrides: dict[str, Any]
    low_peak: bool
    pieces: int
    inner_pieces: int
    holds_output: bool
    strict_order: bool
    lean_code: bool
    optimizer: OptimizerMemory | None
    budget_bytes: int | None
    budget_of: str
    solver: SolverRow
    predicted: Predicted
    course: StepCourse | None
    notes: tuple[str, ...]
    kernels: tuple[KernelChoice, ...]
    tensors: tuple[ParameterKey, ...]
    regions: tuple[RegionRow, ...]


FREE_FIELDS = ("inputs", "overrides")
"""Fields of a document with values of any layout."""


def document_of(plan: Plan, fingerprint: str) -> Document:
    """What the file of `plan` holds."""
    decisions, recipe = iter(plan.decisions), plan.recipe
    return pick(
        Document, plan, recipe, schema_version=SCHEMA_VERSION, fingerprint=fingerprint,
        created_with=dict(plan.created_with), overrides=dict(recipe.overrides),
        solver=pick(SolverRow, plan, name=plan.solver), predicted=pick(Predicted, plan),
        regions=tuple(_region_row(region, decisions) for region in recipe.regions))


def _region_row(region: RegionRecipe, decisions: Iterator[Decision]) -> RegionRow:
    """The row of a region; the next decisions are those about its ops."""
    return pick(
        RegionRow, region,
        decisions=tuple(pick(DecisionRow, next(decisions), key) for key in region.forward),
        backward=tuple(OpRow(key.name, key.result, key.digest) for key in region.backward))


_Kind = TypeVar("_Kind")


def pick(kind: type[_Kind], *sources: object, **given: object) -> _Kind:
    """A `kind` (a dataclass) of the fields `given`; the others are those of the first of `sources`
    that has a field of that name."""
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in given:
            source = next(source for source in sources if hasattr(source, field.name))
            given[field.name] = getattr(source, field.name)
    return kind(**given)
