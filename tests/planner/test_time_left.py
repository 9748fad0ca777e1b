"""When a search among compiled steps begins nothing more; a clock that is set by hand is the
oracle."""

from types import SimpleNamespace

import pytest

from planner.search import time_left
from planner.search.time_left import TimeLeft


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(time_left.time, "monotonic", lambda: now.seconds)
    return now


def test_a_limit_leaves_the_time_to_generate_the_whole_step(clock):
    time = TimeLeft(60.0, SimpleNamespace(whole_seconds=10.0))
    assert time.deadline == 160.0
    slow = TimeLeft(60.0, SimpleNamespace(whole_seconds=50.0))
    assert slow.deadline == 134.0  # 84 seconds are to be enough for all


def test_nothing_is_begun_that_would_end_too_late(clock):
    breakdown = SimpleNamespace(whole_seconds=10.0)
    time = TimeLeft(60.0, breakdown)
    time.code_seconds = 15.0
    clock.seconds = 150.0
    assert not time.is_late(solver_seconds=5.0)
    assert not time.is_over
    breakdown.whole_seconds = 20.0  # the machine has begun to do other things
    assert time.is_late(solver_seconds=5.0)
    assert time.is_over and time.allows_whole()
    clock.seconds = 170.0
    assert not time.allows_whole()


def test_what_was_late_once_stays_so(clock):
    time = TimeLeft(60.0, SimpleNamespace(whole_seconds=1.0))
    clock.seconds = 161.0
    assert time.is_late(0.0)
    clock.seconds = 100.0
    assert time.is_late(0.0)


def test_a_search_that_another_one_was_before_began_when_that_did(clock):
    first = TimeLeft(60.0, SimpleNamespace(whole_seconds=1.0))
    clock.seconds = 130.0
    second = TimeLeft(60.0, SimpleNamespace(whole_seconds=1.0), first.started)
    assert second.deadline == first.deadline
