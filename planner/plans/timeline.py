"""Memory over the course of one step under a plan, run by run and by category.

What the simulator knows, for drawing: positions count runs of ops (recomputations included), sizes
include resident memory.  The optimizer's step is not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_capture.training_graph import Phase
from planner.errors import PlanMismatch
from planner.plans.plan import Plan
from planner.search.planning import PreparedStep
from planner.step.accounting import CATEGORIES, account, memory_at
from solvers.simulator import unroll


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Bytes at each run of the step, by category."""

    bytes_of: tuple[tuple[int, ...], ...]
    """For each run, the bytes of each category, in the order of
    `planner.step.accounting.CATEGORIES`."""
    ops: tuple[str, ...]
    """For each run, the name of its op."""
    backward_begins: int | None
    """The first run that belongs to the backward."""

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def peak_bytes(self) -> int:
        """The most that is held at any run."""
        return max(sum(sizes) for sizes in self.bytes_of)

    def by_category(self) -> dict[str, list[int]]:
        """Category to its bytes at each run."""
        return {name: [sizes[place] for sizes in self.bytes_of]
                for place, name in enumerate(CATEGORIES)}


def memory_timeline(prepared: PreparedStep, plan: Plan) -> MemoryTimeline:
    """The timeline of `plan` on the step that it was made for.

    Raises `PlanMismatch` where the plan names an op that the step lacks.
    """
    from planner.plans.decisions import schedule_of

    prepared = prepared.variant_of(plan.recipe)
    graph = prepared.graph
    try:
        schedule = schedule_of(graph, plan.recipe)
    except KeyError as missing:
        raise PlanMismatch(f"the plan recomputes {missing.args[0]!r}, which this step does not "
                           "have; plan this model anew") from None
    timeline = unroll(prepared.problem, schedule)
    step = account(graph, timeline, prepared.optimizer)
    resident = {"parameters": step.memory["parameters"], "buffers": step.memory["buffers"],
                "inputs": step.memory["inputs"], "optimizer": step.memory["optimizer"],
                "gradients": graph.resident.gradients_bytes}
    rows = []
    for position in range(len(schedule)):
        made = memory_at(graph, timeline, position)
        rows.append(tuple(resident.get(name, 0) + made.get(name, 0) for name in CATEGORIES))
    return MemoryTimeline(tuple(rows), tuple(graph.ops[index].name for index in schedule),
                          _first_backward(schedule, [op.phase for op in graph.ops]))


def _first_backward(schedule: Sequence[int], phases: Sequence[Phase]) -> int | None:
    return next((position for position, index in enumerate(schedule)
                 if phases[index] is Phase.BACKWARD), None)
