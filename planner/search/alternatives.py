"""Rewording of infeasible budgets: as percentages, and with what other choices would need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from planner.arguments.budget import Budget
from planner.arguments.planning import CHOICES, Planning
from planner.errors import CaptureError, InfeasibleBudget
from planner.search.eager import infeasible
from planner.step.lowering import host_link
from planner.step.prepared import PreparedStep
from planner.units import format_bytes


def with_alternatives(refusal: InfeasibleBudget, planning: Planning, prepared: PreparedStep,
                      prepared_for: Callable[[Planning], PreparedStep]) -> InfeasibleBudget:
    """The refusal with the smallest budgets of plans with more choices than `planning` allows,
    where these are smaller; for reserved memory it is unchanged."""
    if planning.budget_of != "allocated":
        return refusal
    found: dict[tuple[str, ...], int] = {}
    for choice in CHOICES:
        if choice in planning.allow:
            continue
        try:
            wider = replace(planning, allow=(*planning.allow, choice))
            link = host_link(wider, prepared.base.graph.device)
            other = (prepared.with_link(link) if choice == "offload" and link is not None
                     else prepared_for(wider))
        except (CaptureError, ValueError):  # of the wider arguments only
            continue
        if choice == "chunk" and not any(variant.chunks > 1 for variant in other.variants):
            continue
        if choice == "chunk":  # the others were searched for the refusal
            other = replace(
                other, variants=tuple(variant for variant in other.variants if variant.chunks > 1)
            )
        least = infeasible(other, refusal.budget_bytes).minimum_bytes
        if least < refusal.minimum_bytes:
            found["recompute", *wider.allow] = least
    return refusal.with_alternatives(found) if found else refusal


@contextmanager
def told_in_percent(limit: Budget | None, plain_bytes: int) -> Iterator[None]:
    """Word refusals as percentages if the budget is a fraction of the plain step's peak."""
    try:
        yield
    except InfeasibleBudget as refusal:
        if limit is None or limit.fraction is None:
            raise
        would_do = math.ceil(100 * refusal.minimum_bytes / plain_bytes)
        raise refusal.worded(
            f"{100 * float(limit.fraction):g}% is {format_bytes(refusal.budget_bytes)} of "
            f"{format_bytes(plain_bytes)}; {would_do}% would do "
            f"({format_bytes(would_do * plain_bytes // 100)}): {refusal}") from None
