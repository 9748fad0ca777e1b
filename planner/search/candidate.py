"""A schedule of a step that Inductor compiles, and what its code takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from planner._apply.recipe import Recipe
from planner._graph_capture.training_graph import BufferKind, Phase
from planner.plans.decisions import build_recipe
from planner.solvers.problem import Schedule
from planner.solvers.simulator import unroll
from planner.step.accounting import memory_over
from planner.step.form import Form
from planner.step.prepared import PreparedStep

if TYPE_CHECKING:
    from planner._graph_capture.inductor.compiled_step import CompiledStep


@dataclass(frozen=True)
class Candidate:
    """A schedule and what its compiled step takes."""

    schedule: Schedule
    recipe: Recipe
    step: CompiledStep
    cost: float

    @property
    def peak_bytes(self) -> int:
        """What the compiled step takes at most, above what is resident."""
        return self.step.peak_bytes


peak_bytes_of = attrgetter("peak_bytes")


def recipe_for_inductor(prepared: PreparedStep, form: Form, schedule: Schedule) -> Recipe:
    """What the applier does for a schedule, and Inductor as it does by itself."""
    recipe = build_recipe(prepared, form, unroll(form.problem, schedule))
    return replace(recipe, backend="inductor", regions=tuple(
        replace(region, inplace_reuses=()) for region in recipe.regions))


def foreseen_step(form: Form, schedule: Schedule, off_bytes: int) -> CompiledStep:
    """The step as the problem accounts for it, and `off_bytes` beside that: for a search that is
    out of time."""
    from planner._graph_capture.inductor.compiled_step import CompiledStep

    timeline = unroll(form.problem, schedule)
    course = memory_over(form.graph, timeline)
    course[BufferKind.TEMPORARY] = [
        size + max(0, off_bytes) for size in course[BufferKind.TEMPORARY]]
    at_peak = {kind: row[timeline.peak_position] for kind, row in course.items()}
    begins = next(position for position, index in timeline.runs
                  if form.graph.ops[index].phase is Phase.BACKWARD)
    return CompiledStep(sum(at_peak.values()), at_peak, course, begins)
