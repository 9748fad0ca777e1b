"""The working-set floor: memory that no schedule of a problem can do without."""

from __future__ import annotations

from solvers.problem import Problem


def working_set_bytes(problem: Problem, index: int) -> int:
    """Bytes that every schedule holds while op `index` first runs: its inputs, outputs and
    workspace, and what earlier ops made that is kept to the end."""
    return fixed_bytes(problem, index) - takeover_bytes(problem, index)


def working_set_floor(problem: Problem) -> tuple[int, int]:
    """The largest working set in bytes, and the op whose working set it is; O(ops + reads).

    No schedule has a smaller peak.
    """
    storages = problem.storages
    kept = [False] * len(storages)
    kept_bytes = 0
    floor, bottleneck = -1, 0
    for index, op in enumerate(problem.ops):
        own = sum(storages[s].size_bytes for s in (*op.inputs, *op.outputs) if not kept[s])
        total = kept_bytes + own + op.workspace_bytes - takeover_bytes(problem, index)
        if total > floor:
            floor, bottleneck = total, index
        for storage in op.outputs:
            if storages[storage].kept_to_end:
                kept[storage] = True
                kept_bytes += storages[storage].size_bytes
    return floor, bottleneck


def fixed_bytes(problem: Problem, index: int) -> int:
    """As `working_set_bytes`, with no input's buffer taken over by the output."""
    op, storages = problem.ops[index], problem.storages
    held = {s for s, storage in enumerate(storages)
            if storage.kept_to_end and storage.producer < index}
    held.update(op.inputs, op.outputs)
    return sum(storages[s].size_bytes for s in held) + op.workspace_bytes


def takeover_candidates(problem: Problem, index: int) -> tuple[int, ...]:
    """The inputs whose buffer the output of op `index` may take over at its first run under some
    schedule: not kept to the end, and with an instance made in the same segment."""
    here = problem.segment_of[index]
    return tuple(
        s for s in problem.ops[index].inplace
        if not problem.storages[s].kept_to_end
        and (problem.segment_of[problem.storages[s].producer] == here
             or problem.may_replay(problem.storages[s].producer, index)))


def takeover_bytes(problem: Problem, index: int) -> int:
    """Bytes that op `index` saves where its output takes over an input's buffer."""
    candidates = takeover_candidates(problem, index)
    return problem.storages[candidates[0]].size_bytes if candidates else 0
