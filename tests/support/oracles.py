"""An independent evaluation of schedules, written from the rules and not from `solvers.simulator`.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.solvers import Op, Problem, Segment, Storage


def evaluate(problem: Problem, schedule: Sequence[int]) -> tuple[int, float] | None:
    """Return peak and cost of a schedule, or `None` if it is illegal: storage by storage and
    position by position, straight from the definitions, in quadratic time."""
    runs = list(schedule)
    total = len(problem.ops)
    first = {op: runs.index(op) for op in set(runs)}
    if sorted(first) != list(range(total)):
        return None
    if [first[op] for op in range(total)] != sorted(first.values()):
        return None

    def home(op: int) -> int:
        return max(k for k, segment in enumerate(problem.segments) if segment.start <= op)

    where = []
    for position, op in enumerate(runs):
        later = [other for other in range(total) if first[other] >= position]
        where.append(home(min(later)) if later else home(total - 1))
        if first[op] != position and not (
                problem.ops[op].recomputable
                and home(op) in problem.segments[where[-1]].replays):
            return None

    memory = [problem.ops[op].workspace_bytes for op in runs]
    last_alive: dict[tuple[int, int], int] = {}
    for index, storage in enumerate(problem.storages):
        births = [p for p, op in enumerate(runs) if op == storage.producer]
        reads = [p for p, op in enumerate(runs) if index in problem.ops[op].inputs]
        for which, birth in enumerate(births):
            if storage.kept_to_end:
                end = len(runs) - 1 if which == 0 else birth
            else:
                until = births[which + 1] if which + 1 < len(births) else len(runs)
                end = max([birth, *(p for p in reads if birth < p < until)])
            last_alive[index, birth] = end
            for position in range(birth, end + 1):
                memory[position] += storage.size_bytes
    for op, described in enumerate(problem.ops):
        positions = [p for p, other in enumerate(runs) if other == op]
        if len(positions) > 1:
            for position in range(positions[0], positions[-1] + 1):
                memory[position] += described.replay_state_bytes
    for position, op in enumerate(runs):
        for storage in problem.ops[op].inplace:
            producer = problem.storages[storage].producer
            birth = max(p for p, other in enumerate(runs[:position]) if other == producer)
            if (not problem.storages[storage].kept_to_end
                    and last_alive[storage, birth] == position and where[birth] == where[position]):
                memory[position] -= problem.storages[storage].size_bytes
                break
    return max(memory), sum(problem.ops[op].cost for op in runs)


def training_chain(length: int, *, segments: bool = True) -> Problem:
    """Return a forward chain of unit ops and its backward: step i back reads forward value i and
    the gradient of the step before it."""
    ops = [Op(f"f{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(length)]
    for i in reversed(range(length)):
        made = len(ops)
        ops.append(Op(f"b{i}", 1.0, (i, made - 1) if i + 1 < length else (i,), (made,),
                      recomputable=False))
    storages = tuple(Storage(1, i) for i in range(2 * length))
    parts = (Segment(0, ()), Segment(length, (0,))) if segments else (Segment(0, (0,)),)
    return Problem(tuple(ops), storages, parts)
