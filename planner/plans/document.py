"""The layout of a plan's file: written by `planner.plans.writing`, read by `planner.plans.file`,
and published as the JSON Schema `planner/plan.schema.json`.

A file contains the fields of a plan and of its rewrite spec in groups: the step (`ops`, `buffers`),
its treatment (`regions`), and what follows from the two.  Every field is required, no others are
allowed, and every whole number is a count: not below 0.  The fields are documented in the classes
that they come from (`SOURCES` of `tests.support.plan_schema`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from planner._apply.rewrite_spec import (
    CallSignature,
    InplaceReuse,
    Insertion,
    ParameterKey,
    SymbolicSizes,
)
from planner._graph_capture.training_graph import (
    Buffer,
    CodeMemory,
    KernelChoice,
    OptimizerMemory,
    Phase,
    RegionSignature,
    ResidentMemory,
    TrainingOp,
)
from planner.arguments.parallel import DataParallel
from planner.plans.decisions import Decision
from planner.solvers.problem import Link
from planner.solvers.result import Status
from planner.step.categories import MemoryByCategory, StepTimeline

if TYPE_CHECKING:
    from planner.plans.plan import Plan

SCHEMA_VERSION = 1
"""Layout version that this version writes and reads."""


Change = Annotated[float, msgspec.Meta(gt=-1)]
"""A relative change, above -1."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted memory and time of one training step, with and without the plan."""

    peak_bytes: int
    """Predicted peak of the whole step under the plan."""
    baseline_peak_bytes: int
    """Predicted peak of the plain step: the eager model without a plan."""
    reserved_bytes: int | None
    """Predicted memory that torch's allocator reserves on the GPU under the plan, in its steady
    state: allocated memory, unused parts of segments, and the workspaces of cuBLAS.  The CUDA
    context and the buffers of NCCL are not included.  `None` without such an allocator (on a CPU)
    or if the blocks of the step are not known one by one (for Inductor)."""
    baseline_reserved_bytes: int | None
    """The same for the plain step."""
    resident_bytes: int
    """Allocated before the step begins: parameters, buffers, inputs, optimizer state."""
    forward_backward_peak_bytes: int
    """Predicted peak of forward, loss and backward, resident memory included."""
    optimizer_step_peak_bytes: int
    """Predicted peak of the optimizer's step, resident memory included; 0 without an optimizer."""
    memory: MemoryByCategory
    """Bytes at the peak by category; sums to `peak_bytes`."""
    overhead: Change
    """Estimated extra step time, as a fraction of the step without recomputation.  Below 0 if the
    kernels of a plan for Inductor were timed and are faster."""
    recompute_flops: int
    """FLOPs of recomputation in one step."""
    offloaded_bytes: int = field(default=0, kw_only=True)
    """Bytes stored on the host in one step and fetched back."""
    transfer_seconds: float = field(default=0.0, kw_only=True)
    """Estimated time of these copies, both ways together.  They overlap with the ops; time that ops
    wait for them is part of `overhead`."""
    step_flops: int
    """FLOPs of one step without recomputation."""


@dataclass(frozen=True, slots=True)
class OpRow:
    """An op of the step, or a point at which code outside its regions allocates memory."""

    name: str
    region: int | None
    """Index of its region; null for the loss and for code between regions."""
    phase: Phase
    module: str
    inputs: tuple[int, ...]
    """Buffers that it reads, as indices into `buffers`."""
    outputs: tuple[int, ...]
    inplace: tuple[int, ...]
    workspace_bytes: int
    replay_state_bytes: int
    flops: int
    seconds: float
    pinned: str
    result: str
    digest: str


@dataclass(frozen=True, slots=True)
class RegionRow:
    """A captured region of the model."""

    block: str
    cotangents: tuple[bool, ...]
    decisions: tuple[Decision, ...]
    insertions: tuple[Insertion, ...]
    inplace_reuses: tuple[InplaceReuse, ...]
    region_signature: RegionSignature | None
    hoisted: tuple[int, ...]
    code: tuple[CodeMemory, ...]
    released: tuple[int, ...]
    elided: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SolverRow:
    """The solver that found the plan, and its proof."""

    name: str
    status: Status
    overhead_bound: Change


@dataclass(frozen=True, slots=True)
class Document:
    """A plan for one training step of a PyTorch model: which activations to keep and which to
    recompute."""

    schema_version: Annotated[int, msgspec.Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    created_with: Annotated[dict[str, str], msgspec.Meta(
        extra_json_schema={"required": ["checkpoint-planner", "torch"]})]
    fingerprint: Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
    """Hash of all other fields."""
    device: str
    backend: Literal["eager", "inductor"]
    cost_model: str
    parallel: DataParallel | None
    training: bool
    inputs: Any
    signature: CallSignature | None
    sizes: SymbolicSizes | None
    overrides: dict[str, Any]
    low_peak: bool
    chunks: int
    inner_chunks: int
    holds_output: bool
    kernel_order: bool
    low_memory_codegen: bool
    optimizer: OptimizerMemory | None
    resident: ResidentMemory
    link: Link | None
    budget_bytes: int | None
    budget_of: Literal["allocated", "reserved"]
    solver: SolverRow
    predicted: Predicted
    memory_timeline: StepTimeline
    notes: tuple[str, ...]
    kernels: tuple[KernelChoice, ...]
    assumptions: tuple[str, ...]
    tensors: tuple[ParameterKey, ...]
    regions: tuple[RegionRow, ...]
    ops: tuple[OpRow, ...]
    buffers: tuple[Buffer, ...]


FREE_FIELDS = ("inputs", "overrides")
"""Fields of a document with values of any layout."""


def document_of(plan: Plan) -> Document:
    """The content of the file of `plan`, without the fingerprint."""
    decisions, spec = iter(plan.decisions), plan.spec
    return pick(
        Document, plan, spec, schema_version=SCHEMA_VERSION, fingerprint="",
        created_with=dict(plan.created_with), overrides=dict(spec.overrides),
        solver=pick(SolverRow, plan, name=plan.solver), predicted=pick(Predicted, plan),
        regions=tuple(
            pick(RegionRow, region, decisions=tuple(next(decisions) for _ in region.forward))
            for region in spec.regions),
        ops=tuple(pick(OpRow, op, region=None if op.region < 0 else op.region)
                  for op in spec.ops))


def ops_of(document: Document) -> tuple[TrainingOp, ...]:
    """The ops of the step, as in a rewrite spec."""
    return tuple(pick(TrainingOp, row, region=-1 if row.region is None else row.region, source="",
                      target="", bytes_moved=0) for row in document.ops)


_Kind = TypeVar("_Kind")


def pick(kind: type[_Kind], *sources: object, **given: object) -> _Kind:
    """Build the dataclass `kind` from the fields `given`; other fields come from the first of
    `sources` with a field of that name."""
    for each in fields(kind):  # type: ignore[arg-type]
        if each.name not in given:
            source = next(source for source in sources if hasattr(source, each.name))
            given[each.name] = getattr(source, each.name)
    return kind(**given)
