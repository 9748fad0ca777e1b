"""The plan: what to keep and what to recompute in one training step, and what that costs.

A plan is plain data.  It holds names, numbers and digests, no tensor and no graph; so it can be
compared, saved, sent to another machine and applied to any model whose step has the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from planner._apply.rewrite_spec import RewriteSpec
from planner._graph_capture.training_graph import KernelChoice, OptimizerMemory, ResidentMemory
from planner.arguments.parallel import DataParallel
from planner.plans.decisions import Decision
from planner.plans.predicted import Change, Predicted
from planner.solvers.problem import Link
from planner.solvers.result import Status
from planner.step.timeline import StepTimeline

if TYPE_CHECKING:
    from torch import nn

    from planner.plans.selective import SelectiveCheckpointing


@dataclass(frozen=True, slots=True)
class Plan(Predicted):
    """An immutable plan of one training step.  Equal plans give equal files, byte for byte."""

    budget_bytes: int | None
    """The limit on `peak_bytes`, or on what `budget_of` says; `None`: no limit."""
    budget_of: str
    """What the budget limits: `allocated` memory (`peak_bytes`), or `reserved` (`reserved_bytes`).
    """
    overhead_bound: Change
    """Proven lower bound on `overhead` for any schedule within the budget that keeps the graph's
    order of first runs and recomputes forward ops, under the same cost model.  For Inductor nothing
    is proven: 0, or `overhead` where that is less."""
    status: Status
    """`optimal` where `overhead` is proven to be the least possible."""
    solver: str
    """Name of the solver that was asked for."""
    optimizer: OptimizerMemory | None
    """What was counted for the optimizer; `None`: nothing was."""
    device: str
    """The device planned for."""
    backend: str
    cost_model: str
    parallel: DataParallel | None
    """How the run is spread over ranks, of which this is the plan of one; `None`: there is one."""
    decisions: tuple[Decision, ...]
    """What happens to each op of the forward, in the order of execution."""
    spec: RewriteSpec
    """What `planner.apply` needs."""
    inputs: Any = field(hash=False)
    """Shapes and dtypes of the inputs planned for, as JSON values."""
    notes: tuple[str, ...]
    """What to know about the capture: a cache that was switched off, a graph break."""
    kernels: tuple[KernelChoice, ...]
    """Kernels of a GPU among which torch chooses, and why; empty for a plan for the CPU."""
    created_with: tuple[tuple[str, str], ...]
    """Versions of this package and of torch, by name."""
    resident: ResidentMemory
    """What `resident_bytes` is made of, beside the state of the optimizer."""
    link: Link | None
    """The way to the host that the plan counts on; `None`: nothing may be stored there."""
    memory_timeline: StepTimeline = field(hash=False, repr=False)
    """Memory over the course of the step."""
    solve_seconds: float | None = field(default=None, compare=False)
    """Wall time of the solver.  Not part of a plan's identity and not in its file: `None` where
    the plan was loaded."""

    @property
    def limited_bytes(self) -> int:
        """What the plan takes of that which its budget limits."""
        if self.budget_of == "allocated" or self.reserved_bytes is None:
            return self.peak_bytes
        return self.reserved_bytes

    def apply(self, model: nn.Module, *,
              replan: Callable[[nn.Module, Any], Plan] | None = None) -> nn.Module:
        """As `planner.apply(model, plan)`."""
        from planner.running.applying import apply

        return apply(model, self, replan=replan)

    def check(self) -> None:
        """Simulate the plan's schedule on the step that the plan states.

        Raises `PlanMismatch` where peak, decisions or anything else does not follow, as in a plan
        that was changed after it was made.  `apply` does it first; a file is checked when it is
        read.
        """
        from planner.errors import PlanMismatch
        from planner.plans.checking import contradiction

        if words := contradiction(self):
            raise PlanMismatch(f"this is not a plan as it was made: {words}; plan again")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to `path` as JSON, all of it or nothing; an existing file is replaced, a
        device or a pipe is written to.

        Raises `OSError` where the path cannot be written.
        """
        from planner.plans.writing import save

        save(self, path)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw memory over the course of the step, by category, beside that of the plain step, to a
        file whose ending names the format (`.png`, `.svg`, `.pdf`).

        Raises `ImportError` where matplotlib is missing, and `OSError` where the path cannot be
        written.
        """
        from planner.reporters.figures import draw_plan

        draw_plan(self, path)

    def selective_checkpointing(self, blocks: Sequence[str] | None = None
                                ) -> SelectiveCheckpointing:
        """The plan as a policy of torch's selective activation checkpointing, for who stays with
        `torch.utils.checkpoint`: for each block the ops whose results are held, and what of the
        plan cannot be said so.

        `blocks`: names of the modules that are checkpointed, wildcards allowed; `None`: the
        outermost numbered ones (`layers.0`).  Raises `ValueError` where there are none, and for a
        plan for Inductor.
        """
        from planner.plans.selective import selective_checkpointing

        return selective_checkpointing(self, blocks)

    def to_dict(self) -> dict[str, Any]:
        """What the file holds, as JSON values; see `plan.schema.json`."""
        from planner.plans.writing import to_dict

        return to_dict(self)

    def __str__(self) -> str:
        from planner.reporters.table import render_plan

        return render_plan(self)
