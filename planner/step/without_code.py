"""Upper bound on the memory of a step that Inductor compiles, where it generates no code.

The model of the world: kernels fuse as `graph_capture.inductor.within_kernels` says, and nothing is
overwritten in place.  Inductor decides whether a kernel stores a pointwise result or each reader
computes it again.  So the result counts as stored, and its operands stay alive as long as they may
be read for it: until its last reader in the same forward or backward of a region and, in a backward
whose kernels keep the plan's order, before the next call of a library.

Blind spots, for which there is a margin: kernels fused because they read the same input; partial
sums of a reduction; copies of matrices that are padded for a multiplication.
"""

from __future__ import annotations

from itertools import accumulate

from planner._graph_capture.inductor.compiled_step import CompiledStep
from planner._graph_capture.training_graph import MADE_BY_STEP, Category, Phase
from planner.solvers.problem import Schedule
from planner.solvers.simulator import unroll
from planner.step.breakdown import backward_begins
from planner.step.variant import Variant

_MARGIN = 0.03
"""Fraction of forward and backward added.  The code of a CPU needs none of it for GPT-2, Llama and
convolutions, but 2.2% where blocks of convolutions are compiled one by one."""


def bound_without_code(variant: Variant, schedule: Schedule, *, is_ordered: bool) -> CompiledStep:
    """Upper bound on the memory of a compiled step; `is_ordered`: kernels of the backward run in
    the order of the schedule."""
    assert variant.compiled is not None
    kernels, graph = variant.compiled.kernels, variant.graph
    timeline = unroll(variant.problem, schedule)
    deaths = [instance.death for instance in timeline.instances]
    made: list[list[int]] = [[] for _ in timeline.schedule]
    for number, instance in enumerate(timeline.instances):
        made[instance.birth].append(number)
    latest: dict[int, int] = {}  # buffer to its instance
    sources: dict[int, tuple[int, ...]] = {}  # of instances that a kernel may compute again
    levels = {kind: [0] * (len(timeline.schedule) + 1) for kind in MADE_BY_STEP}
    segment = -1
    for position, action in enumerate(timeline.schedule):
        if timeline.segments[position] != segment:
            segment = timeline.segments[position]
            sources.clear()
        read: list[int] = []
        if isinstance(action, int):
            op = graph.ops[action]
            if is_ordered and op.phase is Phase.BACKWARD and action in kernels.external:
                sources.clear()
            read = [latest[buffer] for buffer in op.inputs]
            pending = [source for number in read for source in sources.get(number, ())]
            while pending:
                number = pending.pop()
                if deaths[number] < position:
                    deaths[number] = position
                    pending.extend(sources.get(number, ()))
            levels[Category.TEMPORARIES][position] += op.workspace_bytes
            levels[Category.TEMPORARIES][position + 1] -= op.workspace_bytes
        for number in made[position]:
            buffer = timeline.instances[number].storage
            if buffer not in latest or not variant.problem.storages[buffer].kept_to_end:
                latest[buffer] = number
            if isinstance(action, int) and action in kernels.pointwise:
                sources[number] = tuple(read)
    for instance, death in zip(timeline.instances, deaths, strict=True):
        row = levels[graph.buffers[instance.storage].kind]
        row[instance.birth] += graph.buffers[instance.storage].size_bytes
        row[death + 1] -= graph.buffers[instance.storage].size_bytes
    memory = {kind: list(accumulate(row[:-1])) for kind, row in levels.items()}
    temporaries = memory[Category.TEMPORARIES]
    for position, column in enumerate(zip(*memory.values(), strict=True)):
        temporaries[position] += int(_MARGIN * sum(column))
    whole = [sum(column) for column in zip(*memory.values(), strict=True)]
    peak_bytes = max(whole)
    fullest = whole.index(peak_bytes)
    return CompiledStep(
        peak_bytes, {kind: row[fullest] for kind, row in memory.items()}, memory,
        backward_begins(graph, timeline))
