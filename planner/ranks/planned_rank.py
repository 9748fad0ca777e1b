"""Memory of one rank under a plan, which may be a plan for a single device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.ranks.rank_memory import RankCategories, RankMemory
from planner.step.breakdown import breakdown

if TYPE_CHECKING:
    from torch import nn

    from planner.plans.plan import Plan
    from planner.solvers.simulator import Timeline
    from planner.step.variant import Variant


def planned_rank(model: nn.Module, inputs: object, plan: Plan, plain: RankMemory,
                 **arguments: Any) -> RankMemory:
    """The report of a rank under `plan`; `plain`: its plain step; `arguments`: further ones of
    `plan`."""
    from planner.api import capture_for

    if plan.backend != "eager":
        raise ValueError(f"plan: a plan for the backend {plan.backend!r} is one for one device; "
                         'plan with backend="eager" and parallel=')
    variant, timeline = capture_for(plan, model, inputs, parallel=plain.parallel, **arguments)
    found = breakdown(variant, timeline)
    alive: Counter[str] = Counter(found.memory)
    budget = variant.budget
    # Resident buckets count as buffers in a plan, and separately here.
    buckets = sum(plain.bucket_bytes)
    where = "gradients" if plain.parallel.gradient_as_bucket_view else "communication"
    alive.update({"buffers": -buckets, where: buckets})
    if found.peak_bytes == found.forward_backward_peak_bytes:
        gathered, sent = _of_wrapper(variant, timeline)
        alive.update({"parameters": -gathered, "unsharded_parameters": gathered,
                      "temporaries": -sent, "communication": sent})
    return replace(plain, peak_bytes=found.peak_bytes, memory=RankCategories(**alive),
                   resident_bytes=budget.resident_bytes,
                   forward_backward_peak_bytes=found.forward_backward_peak_bytes,
                   optimizer_step_peak_bytes=budget.optimizer_step_bytes,
                   notes=(*plain.notes, f"under a plan: the plain step takes "
                          f"{plain.peak_bytes:,} bytes"))


def _of_wrapper(variant: Variant, timeline: Timeline) -> tuple[int, int]:
    """Bytes of gathered parameters, and of collectives' buffers, at the peak."""
    from planner._graph_capture.memory.trace import COMMUNICATION
    from planner._graph_capture.training_graph import BufferKind

    position, gathered, sent = timeline.peak_position, 0, 0
    for instance in timeline.instances:
        buffer = variant.graph.buffers[instance.storage]
        if instance.birth <= position <= instance.death:
            gathered += buffer.size_bytes if buffer.kind is BufferKind.PARAMETER else 0
            sent += buffer.size_bytes if buffer.label == COMMUNICATION else 0
    return gathered, sent
