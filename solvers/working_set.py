"""Bytes that are certainly in memory while an op first runs."""

from __future__ import annotations

from planner.solvers.problem import Problem


def fixed_bytes(problem: Problem, index: int) -> int:
    """Bytes alive at the first run of op `index` in every schedule: its inputs, outputs and
    workspace, and results of earlier ops that are kept to the end; nothing taken over in place."""
    op, storages = problem.ops[index], problem.storages
    held = {s for s, storage in enumerate(storages)
            if storage.kept_to_end and storage.producer < index}
    held.update(op.inputs, op.outputs)
    return sum(storages[s].size_bytes for s in held) + op.workspace_bytes


def inplace_candidates(problem: Problem, index: int) -> tuple[int, ...]:
    """Return the inputs whose buffer the output of op `index` may take over at its first run under
    some schedule: not kept to the end, and with an instance made in the same segment."""
    here = problem.segment_of[index]
    return tuple(
        s for s in problem.ops[index].inplace
        if not problem.storages[s].kept_to_end
        and (problem.segment_of[problem.storages[s].producer] == here
             or problem.may_replay(problem.storages[s].producer, index)))
