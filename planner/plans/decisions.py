"""Convert a schedule to a rewrite spec and to decisions per op.

A schedule consists of positions and indices, which are valid in one process only.  Here it becomes
names: the ops that run again before each op (`apply.rewrite_spec`), and for every op of the forward
the bytes saved for the backward, with and without the plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Literal, assert_never

from planner._apply.rewrite_spec import (
    Fetch,
    InplaceReuse,
    InsertedAction,
    Insertion,
    OpKey,
    RegionSpec,
    Release,
    RewriteSpec,
    RunAgain,
    Store,
    Stored,
)
from planner._graph_capture.training_graph import CapturedRegion, TrainingGraph
from planner.errors import PlanMismatch
from planner.solvers.actions import Action as ScheduledAction
from planner.solvers.actions import Fetch as ScheduledFetch
from planner.solvers.actions import Release as ScheduledRelease
from planner.solvers.actions import Run, Schedule, as_order
from planner.solvers.actions import Store as ScheduledStore
from planner.solvers.simulator import Timeline
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant

Action = Literal["keep", "recompute", "offload"]
"""Treatment of an op's results; an op that runs again counts as recomputed."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan's treatment of one op of the forward."""

    op: str
    """Stable name, see `graph_capture.training_graph.TrainingOp.name`."""
    module: str
    action: Action
    recomputations: int
    """Number of additional runs of the op in one step."""
    flops: int
    """FLOPs of one run."""
    saved_bytes: int
    """Bytes of its results kept on the device from forward to backward under the plan."""
    plain_saved_bytes: int
    """The same if everything is kept."""


def decide(variant: Variant, schedule: Schedule) -> tuple[Decision, ...]:
    """The decisions of `schedule` for every op of the captured forwards, in their order."""
    graph = variant.graph
    runs = Counter(as_order(schedule))
    stored = {graph.buffers[action.storage].producer for action in schedule
              if isinstance(action, ScheduledStore)}
    saved = _saved_bytes(variant, schedule)
    kept_all = _saved_bytes(variant, variant.problem.keep_all_schedule)
    return tuple(
        Decision(op=op.name, module=op.module,
                 action="recompute" if runs[index] > 1 else (
                     "offload" if index in stored else "keep"),
                 recomputations=runs[index] - 1, flops=op.flops,
                 saved_bytes=saved[index], plain_saved_bytes=kept_all[index])
        for region in graph.regions for index in region.forward
        for op in (graph.ops[index],) if op.digest)


def build_spec(prepared: PreparedStep, variant: Variant, timeline: Timeline) -> RewriteSpec:
    """The rewrite spec of the schedule that `timeline` unrolls, for one graph variant of the step.

    Raises `ValueError` as `build_regions` does.
    """
    return RewriteSpec(
        tensors=prepared.tensors, regions=build_regions(variant.graph, timeline),
        training=prepared.training, overrides=prepared.overrides, low_peak=variant.low_peak,
        chunks=variant.chunks, inner_chunks=variant.inner_chunks, signature=prepared.signature,
        device=variant.graph.device, holds_output=prepared.holds_output, sizes=variant.sizes)


def build_regions(graph: TrainingGraph, timeline: Timeline) -> tuple[RegionSpec, ...]:
    """The regions of a rewrite spec.

    Raises `ValueError` for a schedule that recomputes in the loss, which is the user's own code,
    or after the last op.
    """
    inserted = _insertions(graph, timeline.schedule)
    taken = _inplace_reuses(graph, timeline)
    # An op without a digest is a pseudo-op of the step, not part of the captured graph.
    keys = [OpKey(op.name, op.digest, op.result) for op in graph.ops]
    return tuple(
        RegionSpec(forward=tuple(keys[index] for index in region.forward if keys[index].digest),
                   backward=tuple(keys[index] for index in region.backward
                                  if keys[index].digest),
                   insertions=tuple(inserted[number]), inplace_reuses=tuple(taken[number]),
                   **{each.name: getattr(region, each.name) for each in fields(CapturedRegion)})
        for number, region in enumerate(graph.regions))


def with_step(spec: RewriteSpec, graph: TrainingGraph) -> RewriteSpec:
    """The rewrite spec with the step that it was made for, so that it can be checked."""
    return replace(spec, buffers=graph.buffers, ops=tuple(
        replace(op, source="", target="", bytes_moved=0) for op in graph.ops))


def schedule_of(variant: Variant, spec: RewriteSpec) -> Schedule:
    """The inverse of `build_spec`: the schedule of indices that a rewrite spec describes.

    Raises `PlanMismatch` if the rewrite spec names an op or a result that the graph lacks.
    """
    before = {insertion.before: insertion.actions
              for region in spec.regions for insertion in region.insertions}
    schedule: list[ScheduledAction] = []
    graph = variant.graph
    for index, op in enumerate(graph.ops):
        schedule.extend(_scheduled(graph, action) for action in before.get(op.name, ()))
        schedule.append(Run(index))
    return tuple(schedule)


def _inserted(graph: TrainingGraph, action: ScheduledAction | int) -> InsertedAction:
    """An action, other than a first run, in terms of a rewrite spec."""
    match action:
        case int():
            return RunAgain(graph.ops[action].name)
        case ScheduledStore(storage):
            return Store(*_place(graph, storage))
        case ScheduledRelease(storage):
            return Release(*_place(graph, storage))
        case ScheduledFetch(storage):
            return Fetch(*_place(graph, storage))
        case _:
            assert_never(action)


def _scheduled(graph: TrainingGraph, action: InsertedAction) -> ScheduledAction:
    """The inverse of `_inserted`."""

    def index(name: str) -> int:
        if name not in graph.index_of:
            raise PlanMismatch(f"the plan recomputes {name!r}, which this step does not have; "
                               "plan this model anew")
        return graph.index_of[name]

    def storage(moved: Stored) -> int:
        outputs = graph.ops[index(moved.op)].outputs
        if not 0 <= moved.output < len(outputs):
            raise PlanMismatch(f"the plan moves result {moved.output} of {moved.op!r}, which makes "
                               f"{len(outputs)}; plan this model anew")
        return outputs[moved.output]

    match action:
        case RunAgain(op):
            return Run(index(op))
        case Store():
            return ScheduledStore(storage(action))
        case Release():
            return ScheduledRelease(storage(action))
        case Fetch():
            return ScheduledFetch(storage(action))
        case _:
            assert_never(action)


def _place(graph: TrainingGraph, buffer: int) -> tuple[str, int]:
    """The op that produces a buffer, and the index of that result."""
    maker = graph.ops[graph.buffers[buffer].producer]
    return maker.name, maker.outputs.index(buffer)


def _insertions(graph: TrainingGraph, schedule: Schedule) -> list[list[Insertion]]:
    """For each region, the actions other than first runs, grouped by the first run that follows."""
    groups: list[list[Insertion]] = [[] for _ in graph.regions]
    seen: set[int] = set()
    waiting: list[InsertedAction] = []
    for action in schedule:
        if not isinstance(action, int) or action in seen:
            waiting.append(_inserted(graph, action))
            continue
        seen.add(action)
        if waiting:
            op = graph.ops[action]
            if op.region < 0:
                raise ValueError(f"the schedule recomputes or moves {waiting[0].op} before "
                                 f"{op.name}, which is no op of the model")
            groups[op.region].append(Insertion(op.name, tuple(waiting)))
            waiting = []
    if waiting:
        raise ValueError(f"the schedule recomputes or moves {waiting[0].op} after the last op of "
                         "the step")
    return groups


def _inplace_reuses(graph: TrainingGraph, timeline: Timeline) -> list[list[InplaceReuse]]:
    """For each region, the runs whose result overwrites an operand, as simulated."""
    groups: list[list[InplaceReuse]] = [[] for _ in graph.regions]
    runs: Counter[int] = Counter()
    for index, storage in zip(timeline.schedule, timeline.inplace_of, strict=True):
        if not isinstance(index, int):
            continue
        op = graph.ops[index]
        if storage is not None and op.region >= 0:
            groups[op.region].append(InplaceReuse(op.name, runs[index], op.inplace.index(storage)))
        runs[index] += 1
    return groups


def _saved_bytes(variant: Variant, schedule: Schedule) -> list[int]:
    """For each op, the bytes of its results alive across the end of forward and loss."""
    saved = [0] * len(variant.graph.ops)
    for instance in variant.saved_instances(schedule):
        buffer = variant.graph.buffers[instance.storage]
        saved[buffer.producer] += buffer.size_bytes
    return saved
