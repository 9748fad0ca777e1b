"""Check a training loop against a budget, and say whether recomputation could help."""

from __future__ import annotations

from planner.errors import InfeasibleBudget
from planner.training_loop.report import MemoryReport
from planner.units import format_bytes


def check_budget(report: MemoryReport, budget_bytes: int, budget_of: str = "allocated") -> None:
    """Raise `InfeasibleBudget` unless the loop of `report` stays within a budget, of allocated or
    of reserved memory; its minimum is what the loop takes.

    Raises `ValueError` if reserved memory is not known.
    """
    takes = report.peak_bytes if budget_of == "allocated" else report.reserved_bytes
    if takes is None:
        raise ValueError(f"budget_of={budget_of!r} on the device `{report.device}`: its allocator "
                         "reserves nothing beyond what is allocated")
    if takes > budget_bytes:
        bottleneck = "".join(
            f"{format_bytes(largest.size_bytes)} of {largest.category}"
            + (f" in {largest.module}" if largest.module else "")
            for largest in report.holders[:1])
        raise InfeasibleBudget(
            budget_bytes, takes, bottleneck,
            f"the training loop takes {takes:,} bytes, {takes - budget_bytes:,} more than the "
            f"budget of {budget_bytes:,}; {_remedy(report, budget_bytes)}")


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
