"""The one memory model against a judge written independently from the rules, and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers import IllegalSchedule, Op, Problem, Segment, Storage, simulate, unroll
from tests.support.oracles import evaluate, training_chain
from tests.support.strategies_small import problems, schedules


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_it_agrees_with_the_judge(data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=10))
    schedule = data.draw(schedules(problem))
    assert evaluate(problem, schedule) == tuple(simulate(problem, schedule))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_it_refuses_what_the_judge_refuses(data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=5))
    schedule = data.draw(st.lists(st.integers(0, len(problem) - 1), max_size=8))
    expected = evaluate(problem, schedule)
    if expected is None:
        with pytest.raises(IllegalSchedule):
            simulate(problem, schedule)
    else:
        assert tuple(simulate(problem, schedule)) == expected


def test_a_chain_by_hand() -> None:
    problem = training_chain(3)
    assert simulate(problem, (0, 1, 2, 3, 4, 5)) == (4, 6.0)
    # f0 and f1 die with f2's run at the latest and come back before the steps that read them.
    timeline = unroll(problem, (0, 1, 2, 3, 0, 1, 4, 0, 5))
    assert timeline.memory_bytes == (1, 2, 2, 2, 2, 3, 3, 2, 3)
    assert timeline.peak_position == 5
    assert timeline.cost == 9.0


def test_outputs_kept_to_the_end_stay_and_their_second_instance_does_not() -> None:
    problem = Problem(
        (Op("a", 1.0, (), (0,)), Op("b", 1.0, (0,), (1,)), Op("c", 1.0, (1,), (2,))),
        (Storage(8, 0, kept_to_end=True), Storage(1, 1), Storage(1, 2)))
    assert unroll(problem, (0, 1, 0, 2)).memory_bytes == (8, 9, 17, 10)


def test_a_buffer_is_taken_over_only_where_it_dies_in_the_segment_that_made_it() -> None:
    ops = (Op("a", 1.0, (), (0,)), Op("b", 1.0, (0,), (1,), inplace=(0,)),
           Op("c", 1.0, (1,), (2,), inplace=(1,)))
    storages = (Storage(4, 0), Storage(4, 1), Storage(4, 2))
    timeline = unroll(Problem(ops, storages, (Segment(0, ()), Segment(2, (0,)))), (0, 1, 2))
    assert timeline.inplace_of == (None, 0, None)
    assert timeline.memory_bytes == (4, 4, 8)


@pytest.mark.parametrize(("schedule", "message"), [
    ((0, 1, 2), "never runs"),
    ((1, 0, 2, 3, 4, 5), "first runs must come in order"),
    ((0, 1, 2, 3, 4, 9), "ops 0 to 5"),
    ((0, 0, 1, 2, 3, 4, 5), "must not recompute"),
    ((0, 1, 2, 3, 3, 4, 5), "only once"),
])
def test_an_illegal_schedule_is_refused_with_its_rule(schedule: tuple[int, ...],
                                                      message: str) -> None:
    with pytest.raises(IllegalSchedule, match=message):
        simulate(training_chain(3), schedule)
