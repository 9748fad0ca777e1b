"""The search for the largest number: right against looking at every number, and short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sizes.bracketing import Bracket, find_largest, secant


class Steps:
    """What holds up to a number; some numbers have no answer."""

    def __init__(self, limit, untold=(), slope=7.0, intercept=100.0):
        self.limit, self.untold = limit, frozenset(untold)
        self.slope, self.intercept = slope, intercept
        self.trials = []
        self.values = {}

    def trial(self, number):
        assert number not in self.trials
        self.trials.append(number)
        if number in self.untold:
            return None
        self.values[number] = self.intercept + self.slope * number
        return number <= self.limit

    def guess(self):
        return secant(self.values, self.intercept + self.slope * (self.limit + 0.5))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60),
       st.sets(st.integers(1, 60), max_size=5))
def test_the_answer_is_that_of_looking_at_every_number(limit, first, last, untold):
    first, last = sorted((first, last))
    steps = Steps(limit, untold)
    found = find_largest(steps.trial, lambda: None, first, last)
    told = [number for number in range(first, last + 1) if number not in untold]
    holding = [number for number in told if number <= limit]
    assert found.low == (holding[-1] if holding else None)
    following = [number for number in told if number > limit]
    assert found.high == (following[0] if following else None)


@given(st.integers(1, 10 ** 6))
def test_a_straight_line_takes_few_trials(limit):
    steps = Steps(limit)
    assert find_largest(steps.trial, steps.guess, 1, 2 ** 24) == Bracket(limit, limit + 1)
    assert len(steps.trials) <= 9


@given(st.integers(1, 4000), st.floats(1.1, 3.0))
def test_a_crooked_line_takes_no_more_than_bisection_does_by_far(limit, power):
    steps = Steps(limit)

    def guess():
        bent = {number: number ** power for number in steps.values}
        return secant(bent, (limit + 0.5) ** power)

    assert find_largest(steps.trial, guess, 1, 2 ** 24) == Bracket(limit, limit + 1)
    assert len(steps.trials) <= 40


def test_a_guess_that_learns_nothing_is_followed_once():
    """As the one by extra time where a size fits at none."""
    steps = Steps(69)
    assert find_largest(steps.trial, lambda: 86.0, 64, 2 ** 24) == Bracket(69, 70)
    assert steps.trials == [64, 86, 75, 69, 72, 70]


def test_what_has_no_answer_from_somewhere_on_ends_the_search():
    steps = Steps(1000, untold=range(65, 2000))
    assert find_largest(steps.trial, lambda: None, 1, 2 ** 24) == Bracket(64, None)


def test_only_even_numbers_have_an_answer():
    steps = Steps(37, untold=range(1, 200, 2))
    assert find_largest(steps.trial, steps.guess, 1, 100) == Bracket(36, 38)


def test_nothing_has_an_answer():
    steps = Steps(5, untold=range(1, 100))
    assert find_largest(steps.trial, lambda: None, 1, 50) == Bracket(None, None)
    assert len(steps.trials) <= 9


def test_the_line_through_the_nearest_points():
    assert secant({1: 10.0, 2: 20.0}, 45.0) == pytest.approx(4.5)
    assert secant({1: 10.0, 3: 30.0, 9: 200.0}, 25.0) == pytest.approx(2.5)
    assert secant({1: 10.0}, 45.0) is None
    assert secant({1: 10.0, 2: 10.0}, 45.0) is None
    assert secant({5: 60.0, 6: 70.0}, 45.0) == pytest.approx(3.5)
