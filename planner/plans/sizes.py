"""The sizes of the inputs that a plan serves, and its peak at each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from planner._graph_capture.op_costs.costs import OpCosts
from planner.arguments.planning import check_count
from planner.errors import PlanMismatch
from planner.plans.checking import stated_variant
from planner.plans.decisions import schedule_of
from planner.step.other_sizes import SizedPeak

if TYPE_CHECKING:
    from planner.plans.plan import Plan


def values_of(plan: Plan, sizes: Mapping[str, int]) -> dict[str, int]:
    """The value of each named size; raises as `Plan.peak_bytes_at`."""
    ranges = plan.ranges
    unknown = [name for name in sizes if name not in ranges]
    if unknown:
        known = (f"its sizes are {', '.join(ranges)}" if ranges else
                 "it is for one size: plan with dynamic=, which names the sizes that vary")
        raise TypeError(f"the plan has no size {', '.join(unknown)}; {known}")
    values = {name: largest for name, (_, largest) in ranges.items()}
    values |= {name: check_count(name, size, 0) for name, size in sizes.items()}
    for name, (smallest, largest) in ranges.items():
        if not smallest <= values[name] <= largest:
            raise PlanMismatch(f"{name} {values[name]} is outside of the sizes that the plan "
                               f"serves, {smallest} to {largest}; plan with inputs of a larger "
                               f"{name}" if values[name] > largest else
                               f"{name} {values[name]} is outside of the sizes that the plan "
                               f"serves, {smallest} to {largest}: make a plan for it by itself")
    return values


def fits(plan: Plan, values: Mapping[str, int]) -> bool:
    """True if a step of these sizes stays within the plan's budget."""
    limit_bytes = plan.budget_bytes
    try:
        return limit_bytes is None or sized_peak(plan).is_within(
            max(limit_bytes, plan.peak_bytes), values)
    except ValueError as error:
        raise PlanMismatch(f"the plan says of no peak at these sizes: {error}; plan again"
                           ) from None


@lru_cache(maxsize=16)
def sized_peak(plan: Plan) -> SizedPeak:
    """The peak of a plan as a function of its sizes."""
    assert plan.spec.sizes is not None, "a plan with ranges"
    variant = stated_variant(plan)
    return SizedPeak(variant, schedule_of(variant, plan.spec), plan.spec.sizes,
                     OpCosts(torch.device(plan.device)).workspace_bytes)
