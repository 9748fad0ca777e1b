"""What a problem refuses, and what it derives."""

from __future__ import annotations

import pytest

from planner.solvers import Op, Problem, Segment, Storage


def _chain() -> tuple[list[Op], list[Storage]]:
    return ([Op("a", 1.0, (), (0,)), Op("b", 2.0, (0,), (1,)), Op("c", 3.0, (0, 1), (2,))],
            [Storage(4, 0), Storage(4, 1), Storage(2, 2)])


def _problem(ops: list[Op], storages: list[Storage], *segments: Segment) -> Problem:
    return Problem(tuple(ops), tuple(storages), segments or (Segment(0, (0,)),))


def test_what_it_derives() -> None:
    problem = _problem(*_chain(), Segment(0, ()), Segment(2, (0,)))
    assert len(problem) == 3
    assert problem.keep_all_schedule == (0, 1, 2)
    assert problem.keep_all_cost == 6.0
    assert problem.consumers == ((1, 2), (2,), ())
    assert problem.segment_of == (0, 0, 1)
    assert problem.may_replay(0, 2)
    assert not problem.may_replay(0, 1)
    assert problem.may_replay(1, 3)
    assert not problem.may_replay(2, 3)


@pytest.mark.parametrize(("index", "op", "message"), [
    (1, Op("b", -1.0, (0,), (1,)), "finite cost"),
    (1, Op("b", float("nan"), (0,), (1,)), "finite cost"),
    (1, Op("b", float("inf"), (0,), (1,)), "finite cost"),
    (1, Op("b", 1.0, (0, 0), (1,)), "twice"),
    (1, Op("b", 1.0, (2,), (1,)), "topological"),
    (1, Op("b", 1.0, (7,), (1,)), "topological"),
    (1, Op("b", 1.0, (0,), (2,)), "producer"),
    (1, Op("b", 1.0, (0,), (1,), workspace_bytes=-1), "workspace"),
    (1, Op("b", 1.0, (0,), (1,), replay_state_bytes=-1), "replay state"),
    (2, Op("c", 1.0, (0,), (2,), inplace=(0,)), "take over"),
    (2, Op("c", 1.0, (0,), (2,), inplace=(1,)), "take over"),
])
def test_a_broken_op_is_refused(index: int, op: Op, message: str) -> None:
    ops, storages = _chain()
    ops[index] = op
    with pytest.raises(ValueError, match=message):
        _problem(ops, storages)


def test_broken_storages_and_segments_are_refused() -> None:
    ops, storages = _chain()
    with pytest.raises(ValueError, match="at least one op"):
        Problem((), ())
    with pytest.raises(ValueError, match="negative size"):
        _problem(ops, [Storage(-4, 0), *storages[1:]])
    with pytest.raises(ValueError, match="segments must start at 0"):
        _problem(ops, storages, Segment(1, ()))
    with pytest.raises(ValueError, match="ascend"):
        _problem(ops, storages, Segment(0, ()), Segment(2, ()), Segment(1, ()))
