"""The plan: which activations of one training step to keep and which to recompute, and its cost.

A plan is plain data: names, numbers and digests, no tensor and no graph.  It can be compared,
saved, sent to another machine and applied to any model whose step has the same graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any

from torch import nn

from planner._apply.rewrite_spec import RewriteSpec
from planner._graph_capture.training_graph import (
    CodeMemory,
    KernelChoice,
    OptimizerMemory,
    ResidentMemory,
)
from planner.arguments.parallel import DataParallel
from planner.plans.decisions import Decision
from planner.plans.document import Change, Predicted
from planner.solvers.problem import Link
from planner.solvers.result import Status
from planner.step.categories import StepTimeline
from planner.units import format_bytes


@dataclass(frozen=True, slots=True)
class Plan(Predicted):
    """An immutable plan of one training step.  Equal plans have equal files, byte for byte."""

    budget_bytes: int | None
    """The limit on the memory that `budget_of` names; `None`: no limit."""
    budget_of: str
    """The limited memory: `allocated` (`peak_bytes`) or `reserved` (`reserved_bytes`)."""
    overhead_bound: Change
    """Proven lower bound on `overhead` for any schedule within the budget that keeps the graph's
    order of first runs and recomputes forward ops, under the same cost model.  For Inductor it
    assumes that no choice of saved results has a smaller codegen overhead than those tried, and is
    `overhead` if that is less; 0 with `cost_model="measured"`."""
    status: Status
    """`optimal` if `overhead` is proven minimal."""
    solver: str
    """Name of the requested solver."""
    optimizer: OptimizerMemory | None
    """Memory counted for the optimizer; `None`: nothing was counted."""
    device: str
    """The device of the planned step."""
    backend: str
    cost_model: str
    parallel: DataParallel | None
    """Data parallelism of the run, of which this is the plan of one rank; `None`: a single
    device."""
    decisions: tuple[Decision, ...]
    """Treatment of each op of the forward, in the order of execution."""
    spec: RewriteSpec
    """The rewrite that `planner.apply` performs."""
    inputs: Any = field(hash=False)
    """Shapes and dtypes of the planned inputs, as JSON values."""
    notes: tuple[str, ...]
    """Notes on the capture: a cache that was switched off, a graph break."""
    kernels: tuple[KernelChoice, ...]
    """Kernels of a GPU among which torch chooses, and why; empty for a plan for the CPU."""
    assumptions: tuple[str, ...]
    """Assumptions about inputs without values (on `meta`) that the model's code branches on; a step
    that contradicts them raises `PlanMismatch`."""
    created_with: tuple[tuple[str, str], ...]
    """Versions of this package and of torch, by name."""
    resident: ResidentMemory
    """The parts of `resident_bytes`, except the optimizer's state."""
    link: Link | None
    """Assumed bandwidth to the host; `None`: nothing may be stored there."""
    memory_timeline: StepTimeline = field(hash=False, repr=False)
    """Memory timeline of the step."""
    solve_seconds: float | None = field(default=None, compare=False)
    """Wall time of the solver.  Not part of a plan's identity and not in its file: `None` for a
    loaded plan."""

    @property
    def limited_bytes(self) -> int:
        """Memory of the plan, in the unit that its budget limits."""
        if self.budget_of == "allocated" or self.reserved_bytes is None:
            return self.peak_bytes
        return self.reserved_bytes

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The smallest and the largest value of each named size that the plan serves; empty for a
        plan that was made without `dynamic`."""
        sizes = self.spec.sizes
        return {} if sizes is None else {
            each.name: (each.smallest, each.largest) for each in sizes.ranges}

    @property
    def sized_spec(self) -> RewriteSpec:
        """The rewrite, with a test of the sizes of a step, and bounds for code that was not
        generated when it was planned."""
        from planner.plans.sizes import fits

        spec = self.spec
        if self.backend == "inductor" and not self.offloaded_bytes:
            most = CodeMemory(self.forward_backward_peak_bytes, self.forward_backward_peak_bytes)
            spec = replace(spec, regions=tuple(
                region if region.code else replace(region, code=(most, most))
                for region in spec.regions))
        return spec if spec.sizes is None else replace(spec, fits=partial(fits, self))

    def peak_bytes_at(self, **sizes: int) -> int:
        """Predicted peak of the whole step under the plan at these sizes; those that are not given
        are the planned ones, the largest.

        Nothing is traced: the schedule is simulated with other numbers.  Workspace of single ops is
        measured where the device is present.

        Raises `PlanMismatch` for a size outside `ranges`, and `TypeError` for a name that is none
        of them.
        """
        from planner.plans.sizes import sized_peak, values_of

        values = values_of(self, sizes)
        return sized_peak(self).bytes_at(values) if sizes else self.peak_bytes

    def resident_bytes_at(self, **sizes: int) -> int:
        """Resident memory of a step of these sizes; otherwise as `peak_bytes_at`."""
        from planner.plans.sizes import sized_peak, values_of

        values = values_of(self, sizes)
        return sized_peak(self).resident_bytes_at(values) if sizes else self.resident_bytes

    def apply(self, model: nn.Module, *,
              replan: Callable[[nn.Module, Any], Plan] | None = None) -> nn.Module:
        """Like `planner.apply(model, plan)`."""
        from planner.running.applying import apply

        return apply(model, self, replan=replan)

    def check(self) -> None:
        """Simulate the plan's schedule on the step that the plan states.

        Raises `PlanMismatch` if peak, decisions or any other field do not follow, as in a plan that
        was edited.  `apply` calls it first; a file is checked when it is read.
        """
        from planner.errors import PlanMismatch
        from planner.plans.checking import contradiction

        if words := contradiction(self):
            raise PlanMismatch(f"this is not a plan as it was made: {words}; plan again")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to `path` as JSON, atomically; an existing file is replaced, a device or a
        pipe is written to.

        Raises `OSError` if the path cannot be written.
        """
        from planner.plans.writing import save

        save(self, path)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the memory timeline of the step by category, with that of the plain step, to a file
        whose extension names the format (`.png`, `.svg`, `.pdf`).

        Raises `ImportError` if matplotlib is missing, and `OSError` if the path cannot be written.
        """
        from planner.reporters.figures import draw_plan

        draw_plan(self, path)

    def to_dict(self) -> dict[str, Any]:
        """The content of the plan's file, as JSON values; see `plan.schema.json`."""
        from planner.plans.writing import to_dict

        return to_dict(self)

    def __str__(self) -> str:
        from planner.reporters.table import plain_text, plan_report

        return plain_text(plan_report(self))


def summarize(plan: Plan) -> str:
    """Budget, peak, and extent of recomputation, in one line for logs."""
    recomputed = sum(row.action == "recompute" for row in plan.decisions)
    limit = "no budget" if plan.budget_bytes is None else (
        f"budget {format_bytes(plan.budget_bytes)}")
    return (f"planned for {plan.backend}: {limit}, predicted peak "
            f"{format_bytes(plan.peak_bytes)} (as the model runs today "
            f"{format_bytes(plan.baseline_peak_bytes)}), {recomputed} of {len(plan.decisions)} ops "
            f"recomputed, estimated extra time {plan.overhead:.1%}")
