"""A schedule of a step for Inductor, and the memory of its compiled code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from planner._apply.rewrite_spec import RewriteSpec
from planner._graph_capture.training_graph import BufferKind, Phase
from planner.plans.decisions import build_spec
from planner.solvers.problem import Schedule
from planner.solvers.simulator import unroll
from planner.step.breakdown import memory_over
from planner.step.prepared import PreparedStep
from planner.step.variant import Variant

if TYPE_CHECKING:
    from planner._graph_capture.inductor.compiled_step import CompiledStep


@dataclass(frozen=True)
class Candidate:
    """A schedule with its compiled step."""

    schedule: Schedule
    spec: RewriteSpec
    step: CompiledStep
    cost: float

    @property
    def peak_bytes(self) -> int:
        """Peak of the compiled step above resident memory."""
        return self.step.peak_bytes


peak_bytes_of = attrgetter("peak_bytes")


def spec_for_inductor(prepared: PreparedStep, variant: Variant, schedule: Schedule) -> RewriteSpec:
    """The rewrite spec of a schedule, without in-place reuses, which Inductor chooses itself."""
    spec = build_spec(prepared, variant, unroll(variant.problem, schedule))
    return replace(spec, backend="inductor", regions=tuple(
        replace(region, inplace_reuses=()) for region in spec.regions))


def foreseen_step(variant: Variant, schedule: Schedule, off_bytes: int) -> CompiledStep:
    """The compiled step as the problem predicts it, plus `off_bytes` of temporaries, for a search
    that is out of time."""
    from planner._graph_capture.inductor.compiled_step import CompiledStep

    timeline = unroll(variant.problem, schedule)
    memory_timeline = memory_over(variant.graph, timeline)
    memory_timeline[BufferKind.TEMPORARY] = [
        size + max(0, off_bytes) for size in memory_timeline[BufferKind.TEMPORARY]]
    at_peak = {kind: row[timeline.peak_position] for kind, row in memory_timeline.items()}
    begins = next(position for position, index in timeline.runs
                  if variant.graph.ops[index].phase is Phase.BACKWARD)
    return CompiledStep(sum(at_peak.values()), at_peak, memory_timeline, begins)
