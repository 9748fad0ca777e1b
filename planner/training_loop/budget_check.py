"""Check a training loop against a budget, and whether recomputation could help."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner.errors import InfeasibleBudget
from planner.training_loop.report import MemoryReport
from planner.units import format_bytes


@dataclass(frozen=True, slots=True)
class PhaseOver:
    """A phase that exceeds the budget."""

    step: str
    """`loading`, `first step` or `later steps`."""
    phase: str
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class BudgetCheck:
    """Result of comparing a training loop with a budget."""

    budget_bytes: int
    peak_bytes: int
    """Peak of the loop, or its reserved memory if the budget limits that."""
    over: tuple[PhaseOver, ...]
    """Phases that allocate more than the budget, in the order of the loop; empty if the loop fits,
    or if only reserved memory exceeds the budget."""
    remedy: str
    """Advice to make it fit; empty if it fits."""
    bottleneck: str
    """The largest tensors at the peak, in words."""

    @property
    def fits(self) -> bool:
        """True if the loop stays within the budget."""
        return self.peak_bytes <= self.budget_bytes

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; sizes are bytes."""
        return {
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "over_bytes": max(0, self.peak_bytes - self.budget_bytes),
            "over": [asdict(each) for each in self.over],
            "remedy": self.remedy,
        }

    def require(self) -> None:
        """Raise `InfeasibleBudget` unless the loop fits; its minimum is the loop's peak."""
        if not self.fits:
            raise InfeasibleBudget(
                self.budget_bytes, self.peak_bytes, self.bottleneck,
                f"the training loop takes {self.peak_bytes:,} bytes, "
                f"{self.peak_bytes - self.budget_bytes:,} more than the budget of "
                f"{self.budget_bytes:,}; {self.remedy}")


def check_budget(report: MemoryReport, budget_bytes: int, budget_of: str = "allocated"
                 ) -> BudgetCheck:
    """Compare the loop of `report` with a budget in bytes, of allocated or of reserved memory.

    Raises `ValueError` if reserved memory is not known.
    """
    takes = report.peak_bytes if budget_of == "allocated" else report.reserved_bytes
    if takes is None:
        raise ValueError(f"budget_of={budget_of!r} on the device `{report.device}`: its allocator "
                         "reserves nothing beyond what is allocated")
    phases = [("loading", report.loading),
              *(("first step", phase) for phase in report.first.phases),
              *(("later steps", phase) for phase in report.steady.phases)]
    over = tuple(PhaseOver(step, phase.phase.value, phase.peak_bytes) for step, phase in phases
                 if phase.peak_bytes > budget_bytes)
    largest = report.holders[0] if report.holders else None
    bottleneck = "" if largest is None else (
        f"{format_bytes(largest.size_bytes)} of {largest.category}"
        + (f" in {largest.module}" if largest.module else ""))
    return BudgetCheck(budget_bytes, takes, over,
                       _remedy(report, budget_bytes) if takes > budget_bytes else "", bottleneck)


def _remedy(report: MemoryReport, budget_bytes: int) -> str:
    if report.resident_bytes > budget_bytes:
        return (f"{format_bytes(report.resident_bytes)} are held between steps, by whatever plan: "
                "a smaller model, another optimizer or a sharded run could fit")
    floor = report.floor.size_bytes
    if floor > budget_bytes:
        return (f"recomputation leaves {format_bytes(floor)} at the least: a smaller micro-batch "
                "could fit, or what lowers that floor")
    if report.planned:
        return "a plan made for this budget could fit: planner.plan(..., budget=...)"
    return (f"recomputation could fit, since it leaves {format_bytes(floor)} at the least: "
            "planner.plan(..., budget=...)")
