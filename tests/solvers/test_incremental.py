"""The timeline under edit against the simulator, which is the judge."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers.incremental import EditableTimeline
from planner.solvers.problem import Op, Problem, Storage
from planner.solvers.simulator import unroll
from tests.support.strategies_small import problems, schedules


def _agrees(timeline: EditableTimeline) -> None:
    expected = unroll(timeline.problem, timeline.schedule)
    assert tuple(timeline.memory_bytes) == expected.memory_bytes
    assert timeline.peak_bytes == expected.peak_bytes
    assert timeline.cost == pytest.approx(expected.cost)
    assert [timeline.segment(key) for key in timeline.keys] == list(expected.segments)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_edit_agrees_with_the_simulator(data: st.DataObject) -> None:
    problem = data.draw(problems())
    timeline = EditableTimeline(problem, data.draw(schedules(problem)))
    _agrees(timeline)
    committed = timeline.schedule
    for _ in range(data.draw(st.integers(1, 12))):
        removable = [key for key in timeline.keys
                     if timeline.runs_of[timeline.op_at[key]][0] != key]
        insertable = [(op, key) for op in range(len(problem)) for key in timeline.keys
                      if timeline.may_insert(op, key)]
        kind = data.draw(st.sampled_from(["insert", "remove", "commit", "rollback"]))
        if kind == "insert" and insertable:
            timeline.insert(*data.draw(st.sampled_from(insertable)))
        elif kind == "remove" and removable:
            timeline.remove(data.draw(st.sampled_from(removable)))
        elif kind == "commit":
            timeline.commit()
            committed = timeline.schedule
        elif kind == "rollback":
            timeline.rollback()
            assert timeline.schedule == committed
        _agrees(timeline)


def _chain(length: int) -> Problem:
    ops = tuple(Op(f"op{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(length))
    return Problem(ops, tuple(Storage(1 + i % 3, i) for i in range(length)))


def test_many_insertions_at_one_place_deal_keys_anew() -> None:
    timeline = EditableTimeline(_chain(5), range(5))
    timeline.remove(timeline.insert(0, timeline.keys[2]))
    for _ in range(600):
        timeline.insert(1, timeline.keys[3])
    assert len({*timeline.keys}) == 605
    _agrees(timeline)
    timeline.rollback()
    assert timeline.schedule == (0, 1, 2, 3, 4)
    _agrees(timeline)


def test_the_life_that_a_reader_uses() -> None:
    timeline = EditableTimeline(_chain(4), (0, 1, 2, 1, 3))
    keys = timeline.keys
    assert timeline.life(1, keys[2]) == (keys[1], keys[2])
    assert timeline.life(1, keys[4]) == (keys[3], keys[3])
    assert timeline.life(2, keys[4]) == (keys[2], keys[4])
    assert timeline.life(3, keys[2]) is None


def test_a_first_run_stays() -> None:
    timeline = EditableTimeline(_chain(3), range(3))
    with pytest.raises(ValueError, match="first run of op 1"):
        timeline.remove(timeline.keys[1])
