"""From a schedule to what is kept, what is recomputed and where: the recipe and the decisions.

A schedule speaks of positions and indices, which no other process shares.  Here it becomes names:
before which op which ops run again (`apply.recipe`), and for every op of the forward what crosses
from forward to backward, before and after planning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from apply.recipe import InplaceReuse, OpKey, ParameterKey, Recipe, Recomputation, RegionRecipe
from graph_capture.training_graph import Phase, TrainingGraph
from solvers.problem import Problem, Schedule
from solvers.simulator import Timeline, unroll

Action = Literal["keep", "recompute"]
"""What happens to an op's results; room is left for `offload`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a plan does with one op of the forward."""

    op: str
    """Stable name, see `graph_capture.training_graph.TrainingOp.name`."""
    module: str
    action: Action
    recomputations: int
    """How often the op runs again in one step."""
    flops: int
    """FLOPs of one run."""
    saved_bytes: int
    """Bytes of its results that cross from forward to backward under the plan."""
    plain_saved_bytes: int
    """The same without recomputation."""


def decide(graph: TrainingGraph, problem: Problem, schedule: Schedule) -> tuple[Decision, ...]:
    """What `schedule` does with every op of the captured forwards, in their order."""
    runs = Counter(schedule)
    saved = _saved_bytes(graph, problem, schedule)
    plain = _saved_bytes(graph, problem, problem.plain_schedule)
    return tuple(
        Decision(op=op.name, module=op.module,
                 action="recompute" if runs[index] > 1 else "keep",
                 recomputations=runs[index] - 1, flops=op.flops,
                 saved_bytes=saved[index], plain_saved_bytes=plain[index])
        for region in graph.regions for index in region.forward
        for op in (graph.ops[index],) if op.digest)


def build_recipe(graph: TrainingGraph, timeline: Timeline, *, tensors: Sequence[ParameterKey],
                 training: bool, overrides: Sequence[tuple[str, object]],
                 low_peak: bool = False) -> Recipe:
    """The applier's view of the schedule that `timeline` unrolls.

    Raises `ValueError` for a schedule that recomputes in the loss, which is the user's own code,
    or after the last op.
    """
    again = _recomputations(graph, timeline.schedule)
    taken = _inplace_reuses(graph, timeline)
    # An op without a digest is a pseudo-op of the step, not part of the captured graph.
    keys = [OpKey(op.name, op.digest, op.result) for op in graph.ops]
    regions = tuple(
        RegionRecipe(forward=tuple(keys[index] for index in region.forward if keys[index].digest),
                     backward=tuple(keys[index] for index in region.backward
                                    if keys[index].digest),
                     cotangents=region.cotangents, recomputations=tuple(again[number]),
                     inplace_reuses=tuple(taken[number]), outline=region.outline,
                     block=region.block, hoisted=region.hoisted)
        for number, region in enumerate(graph.regions))
    return Recipe(tensors=tuple(tensors), regions=regions, training=training,
                  overrides=tuple(overrides), low_peak=low_peak)


def schedule_of(graph: TrainingGraph, recipe: Recipe) -> Schedule:
    """The inverse of `build_recipe`: the schedule of indices that a recipe stands for.

    Raises `KeyError` where the recipe names an op that the graph lacks.
    """
    before = {recomputation.before: recomputation.ops
              for region in recipe.regions for recomputation in region.recomputations}
    schedule: list[int] = []
    for index, op in enumerate(graph.ops):
        schedule.extend(graph.index_of[name] for name in before.get(op.name, ()))
        schedule.append(index)
    return tuple(schedule)


def _keys(graph: TrainingGraph, indices: range) -> tuple[OpKey, ...]:
    """The captured ops among these; pseudo-ops have no digest."""
    return tuple(OpKey(op.name, op.digest, op.result)
                 for op in (graph.ops[index] for index in indices) if op.digest)


def _recomputations(graph: TrainingGraph, schedule: Schedule) -> list[list[Recomputation]]:
    """For each region, the ops that run again, gathered by the first run that follows them."""
    groups: list[list[Recomputation]] = [[] for _ in graph.regions]
    seen: set[int] = set()
    waiting: list[str] = []
    for index in schedule:
        op = graph.ops[index]
        if index in seen:
            waiting.append(op.name)
            continue
        seen.add(index)
        if waiting:
            if op.region < 0:
                raise ValueError(f"the schedule recomputes {waiting[0]} before {op.name}, "
                                 "which is no op of the model")
            groups[op.region].append(Recomputation(before=op.name, ops=tuple(waiting)))
            waiting = []
    if waiting:
        raise ValueError(f"the schedule recomputes {waiting[0]} after the last op of the step")
    return groups


def _inplace_reuses(graph: TrainingGraph, timeline: Timeline) -> list[list[InplaceReuse]]:
    """For each region, the runs whose result is written over an operand, as simulated."""
    groups: list[list[InplaceReuse]] = [[] for _ in graph.regions]
    runs: Counter[int] = Counter()
    for index, storage in zip(timeline.schedule, timeline.inplace_of, strict=True):
        op = graph.ops[index]
        if storage is not None and op.region >= 0:
            groups[op.region].append(InplaceReuse(op.name, runs[index], op.inplace.index(storage)))
        runs[index] += 1
    return groups


def _saved_bytes(graph: TrainingGraph, problem: Problem, schedule: Schedule) -> list[int]:
    """For each op, the bytes of its results alive across the end of forward and loss."""
    timeline = unroll(problem, schedule)
    seen: set[int] = set()
    end = -1  # position of the last first run that does not belong to the backward
    for position, index in enumerate(schedule):
        if index not in seen and graph.ops[index].phase is not Phase.BACKWARD:
            end = position
        seen.add(index)
    saved = [0] * len(graph.ops)
    for instance in timeline.instances:
        if instance.birth <= end < instance.death:
            buffer = graph.buffers[instance.storage]
            saved[buffer.producer] += buffer.size_bytes
    return saved
