"""Figures of the training of a model within a budget."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plans.plan import Plan, summarize
from planner.units import format_bytes


@dataclass(frozen=True, slots=True)
class Status:
    """Progress of a model's training within a budget; `str()` is a table."""

    plan: Plan | None
    """The plan of the last call."""
    steps: int
    """Training steps: delimited by steps of the optimizer, or, if no torch optimizer steps the
    model, by the end of a backward."""
    planned_steps: int
    """Steps in which every call with gradients ran under a plan."""
    calls: int
    """Calls of the model with gradients enabled."""
    worst_peak_bytes: int | None
    """The highest measured peak of a training step.  On a GPU: the bytes requested from its
    allocator, as `planner.plan` counts them.  On a CPU: the tensors alive, of the process since
    `within` was called, in the steps that were watched (the first ones, those with something new,
    and later ones as far as watching takes 2% of the time); and what kernels allocate while they
    run, as the plan counts it.  `None` where no step was measured yet, and on a CPU under data
    parallelism."""
    budget_bytes: int | None
    """The budget in force; `None` if there is no limit, or nothing was planned yet."""
    plans: int
    """Number of plans made."""
    planning_seconds: float
    """Wall time of capture and planning."""
    last_reason: str | None
    """Reason why the last unplanned call ran without a plan; `None` if there was no such call."""

    def __str__(self) -> str:
        rows = [("plan", "none yet" if self.plan is None else summarize(self.plan)),
                ("steps", f"{self.planned_steps} of {self.steps} under a plan, {self.calls} calls"),
                ("worst peak", _size(self.worst_peak_bytes) + self._budget()),
                ("planning", f"{self.plans} plans in {self.planning_seconds:.1f} s")]
        if self.last_reason is not None:
            rows.append(("not planned", self.last_reason))
        return "\n".join(f"{name:12}{words}" for name, words in rows)

    def _budget(self) -> str:
        if self.budget_bytes is None:
            return ""
        budget = format_bytes(self.budget_bytes)
        # A percentage is of each step's own plain peak.
        is_another = self.worst_peak_bytes is not None and (
            self.worst_peak_bytes > self.budget_bytes)
        return f"; the budget of the last step is {budget}" if is_another else (
            f" of a budget of {budget}")


def _size(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)
