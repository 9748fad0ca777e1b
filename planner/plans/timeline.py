"""Memory over the course of one step under a plan, run by run and by category.

What the simulator knows, for drawing: positions count runs of ops (recomputations included), sizes
include resident memory.  The optimizer's step is not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_capture.training_graph import Phase
from planner.plans.decisions import schedule_of
from planner.plans.plan import Plan
from planner.step.accounting import memory_at
from planner.step.categories import MemoryCourse
from planner.step.prepared import PreparedStep
from solvers.simulator import unroll


@dataclass(frozen=True, slots=True)
class StepTimeline(MemoryCourse):
    """Bytes by category at each run of an op of the step."""

    ops: tuple[str, ...]
    """For each run, the name of its op."""
    backward_begins: int | None
    """The first run that belongs to the backward."""

    def __len__(self) -> int:
        return len(self.ops)


def memory_timeline(prepared: PreparedStep, plan: Plan) -> StepTimeline:
    """The timeline of `plan` on the step that it was made for.

    Raises `PlanMismatch` where the plan names an op that the step lacks.
    """
    form = prepared.form_of(plan.recipe)
    timeline = unroll(form.problem, schedule_of(form, plan.recipe))
    ops = [form.graph.ops[index] for index in timeline.schedule]
    rows = (form.budget.with_resident(memory_at(form.graph, timeline, position))
            for position in range(len(ops)))
    return StepTimeline(
        tuple(tuple(row.values()) for row in rows), tuple(op.name for op in ops),
        next((run for run, op in enumerate(ops) if op.phase is Phase.BACKWARD), None))
