"""One graph variant of a step: its graph, scheduling problem and memory.

The step as captured is the base variant.  A second variant may use less memory during the backward
at the price of copies (`graph_capture.joint_graph.low_peak_backward`); a part of the step may run
in chunks (`graph_capture.joint_graph.chunks`).  Their cost is paid whether or not anything is
recomputed, and counts as extra time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner._graph_capture.training_graph import HELD_IN_FORWARD, Phase, TrainingGraph
from planner.solvers.actions import Fetch, Store, as_order
from planner.solvers.minimum import working_set_floor
from planner.solvers.offload import relaxed
from planner.solvers.problem import Problem, Schedule
from planner.solvers.simulator import Instance, Timeline, simulate, unroll
from planner.step.budget import StepBudget

if TYPE_CHECKING:
    from planner._apply.rewrite_spec import SymbolicSizes
    from planner.step.compiled_breakdown import CompiledBreakdown


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A graph variant of a step, for any budget.  Each is equal to itself only."""

    graph: TrainingGraph
    problem: Problem
    budget: StepBudget
    compiled: CompiledBreakdown | None = None
    """Evaluates schedules by the code that Inductor generates; `None` for the eager backend."""
    low_peak: bool = False
    """True if gradients are copied so that the backward uses less memory."""
    chunks: int = 1
    """Number of chunks of its widest part."""
    inner_chunks: int = 1
    """Number of chunks of the insides of its layers."""
    extra_seconds: float = 0.0
    """Time of copies and smaller ops: part of the extra time of its plans."""
    sizes: SymbolicSizes | None = None
    """The step at other sizes of its inputs, if it was captured with symbolic sizes."""

    @property
    def base_seconds(self) -> float:
        """Duration of the step without recomputation and copies."""
        return self.graph.step_seconds - self.extra_seconds

    def may_fit(self, net_bytes: int) -> bool:
        """True unless a bound proves that every schedule exceeds `net_bytes`."""
        return self.floor_bytes <= net_bytes

    @property
    def floor_bytes(self) -> int:
        """Lower bound on the net peak of every schedule."""
        return working_set_floor(self.problem if self.problem.link is None
                                 else relaxed(self.problem))

    def net_peak_bytes(self, schedule: Schedule) -> int:
        """Net peak of a schedule: of forward and backward, above resident memory."""
        return simulate(self.problem, schedule).peak_bytes

    def peak_bytes(self, schedule: Schedule) -> int:
        """Peak of the whole step under a schedule."""
        return self.budget.whole_bytes(self.net_peak_bytes(schedule))

    def saved_instances(self, schedule: Schedule) -> tuple[Instance, ...]:
        """Results that are alive across the end of forward and loss."""
        return self._instances_across(
            unroll(self.problem, schedule), lambda phase: phase is not Phase.BACKWARD)

    def kept_buffers(self, timeline: Timeline) -> list[int]:
        """Buffers that a call keeps from the end of its forward to its backward; one as often as it
        is."""
        return [instance.storage for instance in self._instances_across(
                    timeline, lambda phase: phase is Phase.FORWARD)
                if self.graph.ops[self.graph.buffers[instance.storage].producer].name
                != HELD_IN_FORWARD]

    def _instances_across(self, timeline: Timeline, is_before: Callable[[Phase], bool]
                          ) -> tuple[Instance, ...]:
        """Results that are alive across the end of some phases."""
        end = max((position for index, position in timeline.first_runs.items()
                   if is_before(self.graph.ops[index].phase)), default=-1)
        return tuple(instance for instance in timeline.instances
                     if instance.birth <= end < instance.death)

    def offloaded_bytes(self, schedule: Schedule) -> int:
        """Bytes that a schedule stores on the host."""
        return sum(self.problem.storages[action.storage].size_bytes for action in schedule
                   if isinstance(action, Store))

    def transfer_seconds(self, schedule: Schedule) -> float:
        """Time of a schedule's copies to the host and back."""
        link = self.problem.link
        return 0.0 if link is None else sum(
            link.cost(self.problem.storages[action.storage].size_bytes) for action in schedule
            if isinstance(action, Store | Fetch))

    def cost(self, schedule: Schedule) -> float:
        """Cost of all runs of a schedule, in the unit of the problem."""
        return simulate(self.problem, schedule).cost

    def overhead(self, schedule: Schedule) -> float:
        """Seconds of recomputations, copies and waits for the host, as a fraction of the step
        without them; 0 if the ops have no durations."""
        seen: set[int] = set()
        extra = self.graph.step_seconds - self.base_seconds
        if self.problem.link is not None:
            extra += unroll(self.problem, schedule).waiting_cost
        for index in as_order(schedule):
            if index in seen:
                extra += self.graph.ops[index].seconds
            seen.add(index)
        return extra / self.base_seconds if self.base_seconds > 0 else 0.0
