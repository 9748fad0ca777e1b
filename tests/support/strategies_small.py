"""Hypothesis strategies: small problems of every kind, their schedules, and brute force."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from planner.solvers.problem import Op, Problem, Schedule, Segment, Storage


@st.composite
def problems(draw: st.DrawFn, max_ops: int = 8, plain: bool = False) -> Problem:
    """Draw a problem; `plain`: one storage per op, one segment, no in-place, no workspace."""
    count = draw(st.integers(1, max_ops))
    storages: list[Storage] = []
    ops: list[Op] = []
    for index in range(count):
        inputs = tuple(draw(st.lists(st.integers(0, len(storages) - 1), max_size=3, unique=True))
                       ) if storages else ()
        outputs = []
        for _ in range(1 if plain else draw(st.sampled_from([0, 1, 1, 1, 2]))):
            outputs.append(len(storages))
            storages.append(Storage(draw(st.integers(0, 9)), index,
                                    not plain and draw(st.integers(0, 5)) == 0))
        inplace: tuple[int, ...] = ()
        if not plain and len(outputs) == 1 and inputs and draw(st.booleans()):
            taken = draw(st.sampled_from(inputs))
            old = storages[outputs[0]]
            storages[outputs[0]] = Storage(storages[taken].size_bytes, index, old.kept_to_end)
            inplace = tuple(s for s in inputs
                            if storages[s].size_bytes == storages[taken].size_bytes)
        ops.append(Op(
            f"op{index}", float(draw(st.integers(0, 9))), inputs, tuple(outputs),
            workspace_bytes=0 if plain else draw(st.integers(0, 3)),
            recomputable=draw(st.integers(0, 4)) > 0,
            inplace=inplace,
            replay_state_bytes=0 if plain else draw(st.sampled_from([0, 0, 0, 2]))))
    segments = [Segment(0, (0,))]
    if not plain and count > 1 and draw(st.booleans()):
        start = draw(st.integers(1, count - 1))
        segments = [Segment(0, draw(st.sampled_from([(), (0,)]))),
                    Segment(start, draw(st.sampled_from([(), (0,), (0, 1), (1,)])))]
    return Problem(tuple(ops), tuple(storages), tuple(segments))


def insertions(problem: Problem, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yield every legal (op, position) for one more recomputation."""
    for position in range(len(schedule) + 1):
        following = next((op for op in schedule[position:] if op not in schedule[:position]),
                         len(problem))
        for op in sorted(set(schedule[:position])):
            if problem.may_replay(op, following):
                yield op, position


@st.composite
def schedules(draw: st.DrawFn, problem: Problem, max_recomputations: int = 8) -> Schedule:
    """Draw a legal schedule of `problem`."""
    schedule = problem.keep_all_schedule
    for _ in range(draw(st.integers(0, max_recomputations))):
        choices = list(insertions(problem, schedule))
        if not choices:
            break
        op, position = draw(st.sampled_from(choices))
        schedule = (*schedule[:position], op, *schedule[position:])
    return schedule
