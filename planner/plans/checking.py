"""Check a plan against the step that it states: legality, memory, and everything derived from them.

Model of the world: a plan contains the graph of a whole step (`RewriteSpec.ops`,
`RewriteSpec.buffers`) and a schedule of it, written as insertions.  The simulator unrolls that
schedule, and the plan's other statements - in-place reuses, decisions, peak, memory by category,
its timeline - must follow from it.  So no digest is trusted here.  The stated graph is compared
with the model's own graph when the plan is applied (`apply.same_step`).

Blind spots: figures from outside the captured graphs are taken as stated: memory of the loss and of
code between regions, kernel workspace, seconds, and the allocator's reserved memory.  For Inductor
the peak is that of generated code, and is checked when that code is generated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from planner._apply.call_signature import planned_sizes
from planner._apply.rewrite_spec import RegionSpec, RewriteSpec, SymbolicSizes
from planner._apply.size_expressions import number as number_of
from planner._graph_capture.memory.allocator import allocated_bytes
from planner._graph_capture.training_graph import (
    MalformedGraph,
    Phase,
    Region,
    TrainingGraph,
    check,
)
from planner.errors import PlanMismatch
from planner.plans.decisions import build_regions, decide, schedule_of
from planner.plans.document import pick
from planner.solvers.simulator import Timeline, unroll
from planner.step.breakdown import backward_begins, breakdown, memory_over
from planner.step.budget import StepBudget
from planner.step.categories import StepTimeline
from planner.step.lowering import lower
from planner.step.other_sizes import check_calls
from planner.step.variant import Variant

if TYPE_CHECKING:
    from planner.plans.plan import Plan

_MOST_CHUNKS = 16
"""Limit on the number of chunks per op of the step: each chunk of a part has at least one op."""


def contradiction(plan: Plan) -> str | None:
    """The first statement of a plan that does not follow from its graph and schedule, in words;
    `None` if there is none."""
    try:
        variant = stated_variant(plan)
        timeline = unroll(variant.problem, schedule_of(variant, plan.spec))
        return next(_contradictions(plan, variant, timeline), None)
    except (MalformedGraph, PlanMismatch, ValueError) as error:
        return str(error)


def stated_variant(plan: Plan) -> Variant:
    """The step that a plan states; raises `MalformedGraph`, and `ValueError` if it is not a
    step."""
    spec = plan.spec
    try:
        torch.device(plan.device)
    except RuntimeError as error:
        raise ValueError(f"device is {plan.device!r}: {error}") from error
    for op in spec.ops:
        for buffer in (*op.inputs, *op.outputs, *op.inplace):
            if not 0 <= buffer < len(spec.buffers):
                raise ValueError(f"{op.name} names buffer {buffer}, and there are "
                                 f"{len(spec.buffers)}")
        if not -1 <= op.region < len(spec.regions):
            raise ValueError(f"{op.name} is of region {op.region}, and there are "
                             f"{len(spec.regions)}")
    places: dict[tuple[int, Phase], list[int]] = {}
    for index, op in enumerate(spec.ops):
        places.setdefault((op.region, op.phase), []).append(index)

    def span(number: int, phase: Phase) -> range:
        found = places.get((number, phase), [0, -1])
        return range(found[0], found[-1] + 1)

    graph = TrainingGraph(
        spec.ops, spec.buffers, resident=plan.resident, device=plan.device,
        regions=tuple(pick(Region, region, forward=span(number, Phase.FORWARD),
                           backward=span(number, Phase.BACKWARD))
                      for number, region in enumerate(spec.regions)))
    check(graph)
    if min(spec.chunks, spec.inner_chunks) < 1 or (
            max(spec.chunks, spec.inner_chunks) > _MOST_CHUNKS * len(spec.ops)):
        raise ValueError(f"{spec.chunks} and {spec.inner_chunks} chunks of a step of "
                         f"{len(spec.ops)} ops")
    return Variant(graph, lower(graph, plan.link), StepBudget.of(graph, plan.optimizer),
                   low_peak=spec.low_peak, chunks=spec.chunks, inner_chunks=spec.inner_chunks)


def _contradictions(plan: Plan, variant: Variant, timeline: Timeline) -> Iterator[str]:
    """Yield, in words, each statement that does not follow."""
    is_eager = plan.backend == "eager"
    for number, (stated, found) in enumerate(zip(
            plan.spec.regions, build_regions(variant.graph, timeline), strict=True)):
        yield from _of_region(number, stated,
                              found if is_eager else replace(found, inplace_reuses=()))
    decisions = decide(variant, timeline.schedule)
    yield from _first_difference("decisions", plan.decisions, decisions)
    yield from _of_memory(plan, variant, timeline)
    yield from _of_time(plan, variant, timeline)
    if plan.spec.signature is not None:
        tensors = {name for name, sizes in planned_sizes(plan.spec.signature).items() if sizes}
        if forced := sorted(tensors & {name for name, _ in plan.spec.overrides}):
            yield f"overrides gives {', '.join(forced)}, which is a tensor of the inputs"
    if plan.spec.sizes is not None:
        yield from _of_sizes(plan.spec, plan.spec.sizes)


def _of_region(number: int, stated: RegionSpec, found: RegionSpec) -> Iterator[str]:
    where = f"regions[{number}]"
    yield from _first_difference(f"{where}: ops of the forward", stated.forward, found.forward)
    yield from _first_difference(f"{where}: ops of the backward", stated.backward, found.backward)
    yield from _first_difference(f"{where}.insertions", stated.insertions, found.insertions)
    yield from _first_difference(f"{where}.inplace_reuses", stated.inplace_reuses,
                                 found.inplace_reuses)
    if stated.code and len(stated.code) != 2:
        yield f"{where}.code is of {len(stated.code)} graphs, expected a forward and a backward"


def _first_difference(what: str, stated: Sequence[object], found: Sequence[object]
                      ) -> Iterator[str]:
    for have, want in zip_longest(stated, found):
        if have != want:
            yield f"{what}: the schedule gives {want}, the plan says {have}"
            return


def _of_memory(plan: Plan, variant: Variant, timeline: Timeline) -> Iterator[str]:
    budget, memory_timeline = variant.budget, plan.memory_timeline
    expected: dict[str, object] = {
        "resident_bytes": budget.resident_bytes,
        "optimizer_step_peak_bytes": budget.optimizer_step_bytes}
    rows = (memory_timeline.gradients, memory_timeline.activations, memory_timeline.temporaries)
    lengths = {len(row) for row in rows}
    if len(lengths) > 1 or 0 in lengths or memory_timeline.backward_begins > max(lengths):
        yield ("memory_timeline: its rows are of different lengths or empty, or its backward "
               "begins behind their end")
        return
    if memory_timeline.plain.backward_begins > len(memory_timeline.plain.whole_bytes):
        yield "memory_timeline.plain: its backward begins behind its end"
    if plan.backend == "eager":
        found = breakdown(variant, timeline)
        expected |= {"forward_backward_peak_bytes": found.forward_backward_peak_bytes,
                     "memory": found.memory, "peak_bytes": found.peak_bytes}
        expected["memory_timeline"] = StepTimeline.of(
            memory_over(variant.graph, timeline), backward_begins(variant.graph, timeline),
            budget.resident, memory_timeline.plain)
    else:
        net_bytes = max(0, max(map(sum, zip(*rows, strict=True)), default=0)
                        - budget.resident.gradients - budget.resident.activations)
        expected |= {
            "forward_backward_peak_bytes": budget.resident_bytes + net_bytes,
            "peak_bytes": max(plan.forward_backward_peak_bytes, budget.optimizer_step_bytes)}
        for region in plan.spec.regions:
            where = region.block or "the model"
            for code in region.code:
                if code.left_bytes > code.peak_bytes:
                    yield f"the code of {where} leaves more than its peak"
                if code.peak_bytes > plan.forward_backward_peak_bytes:
                    yield (f"the code of {where} takes {code.peak_bytes} bytes, the plan says "
                           f"{plan.forward_backward_peak_bytes} of the whole step")
    for name, value in expected.items():
        if getattr(plan, name) != value:
            yield (f"{name}: the simulator finds {_shown(value)}, the plan says "
                   f"{_shown(getattr(plan, name))}")
    if plan.memory.total_bytes != plan.peak_bytes:
        yield f"memory sums to {plan.memory.total_bytes}, the plan says {plan.peak_bytes}"
    if plan.budget_bytes is not None and plan.limited_bytes > plan.budget_bytes:
        yield (f"budget_bytes: the plan takes {plan.limited_bytes} bytes, more than the budget "
               f"of {plan.budget_bytes}")


def _of_time(plan: Plan, variant: Variant, timeline: Timeline) -> Iterator[str]:
    schedule = timeline.schedule
    expected: dict[str, float] = {
        "recompute_flops": sum(row.flops * row.recomputations for row in plan.decisions),
        "step_flops": variant.graph.step_flops,
        "offloaded_bytes": variant.offloaded_bytes(schedule),
        "transfer_seconds": variant.transfer_seconds(schedule)}
    if plan.backend == "eager" and not plan.spec.is_variant:
        expected["overhead"] = variant.overhead(schedule)
    for name, value in expected.items():
        if not math.isclose(getattr(plan, name), value, rel_tol=1e-9):
            yield f"{name}: the schedule gives {value}, the plan says {getattr(plan, name)}"
    if plan.overhead_bound > plan.overhead:
        yield f"overhead_bound {plan.overhead_bound} is above overhead {plan.overhead}"


def _of_sizes(spec: RewriteSpec, sizes: SymbolicSizes) -> Iterator[str]:
    """Yield, in words, what of a plan's sizes does not follow from its step."""
    names = sizes.names
    if len({*names}) < len(names) or not names:
        yield f"sizes.ranges names {', '.join(names) or 'none'}, expected different ones"
        return
    for each in sizes.ranges:
        if not each.name.isidentifier() or not 2 <= each.smallest <= each.largest:
            yield (f"sizes.ranges: {each.name} is {each.smallest} to {each.largest}, expected a "
                   "name and a range from 2 on")
            return
    yield from _of_dimensions(spec, sizes)
    largest = sizes.largest
    if len(sizes.buffer_bytes) != len(spec.buffers):
        yield (f"sizes.buffer_bytes has {len(sizes.buffer_bytes)} sizes, and there are "
               f"{len(spec.buffers)} buffers")
        return
    for place, (text, buffer) in enumerate(zip(sizes.buffer_bytes, spec.buffers, strict=True)):
        found = allocated_bytes(number_of(text, largest), torch.device(spec.device))
        if found != buffer.size_bytes:
            yield (f"sizes.buffer_bytes[{place}] is {found} at the planned sizes, the buffer "
                   f"{buffer.size_bytes}")
            return
    for text in sizes.input_bytes:
        number_of(text, largest)
    check_calls(sizes)
    for each_call in sizes.kernels:
        if any(not 0 <= place < len(spec.ops) for place in each_call.ops):
            yield f"sizes.kernels: {each_call.call} is of ops that there are not"
            return


def _of_dimensions(spec: RewriteSpec, sizes: SymbolicSizes) -> Iterator[str]:
    """Compare the named dimensions with the planned inputs."""
    planned = {} if spec.signature is None else planned_sizes(spec.signature)
    for each in sizes.dimensions:
        found = planned.get(each.input, ())
        if each.size not in sizes.largest or each.dimension >= len(found) or (
                found[each.dimension] != sizes.largest[each.size]):
            yield (f"sizes.dimensions: dimension {each.dimension} of {each.input} is {each.size}, "
                   f"which the planned inputs do not have")
            return
    if missing := {*sizes.names} - {each.size for each in sizes.dimensions}:
        yield f"sizes.dimensions: no dimension is {', '.join(sorted(missing))}"


def _shown(value: object) -> str:
    return shortened(str(value), 200)


def shortened(text: str, most: int) -> str:
    """The text in so many characters."""
    return text if len(text) <= most else text[:most - 3] + "..."
