"""Find the largest integer for which a predicate holds, in as few trials as possible.

Model of the world: a trial is expensive (a capture, a plan), the predicate holds up to some number
and not beyond, and the caller can guess that number from the trials so far.  Guesses are followed
while they shrink the interval; otherwise, or after a trial has refuted them, the interval is
bisected.  A trial may have no answer (a shape that cannot be captured): then its neighbours are
tried.

Blind spot: for a predicate that is not monotonic, the answer is one of the boundaries: it holds
there, and not at the next number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

Trial = Callable[[int], bool | None]
"""The predicate; `None`: no answer at this number."""

Guess = Callable[[], float | None]
"""The expected largest number, from the trials so far; `None`: no guess."""

NEIGHBOURS = 8
"""Distance up to which the neighbours of a number without an answer are tried."""
_FARTHEST = 64
"""Guesses are limited to this multiple of the largest number that holds."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """The boundary of the predicate."""

    low: int | None
    """The largest number found at which it holds; `None`: it holds at none."""
    high: int | None
    """The next number above `low` with an answer: it does not hold there.  `None`: `low` is the end
    of the range, or the numbers tried above it have no answer."""


def find_largest(trial: Trial, guess: Guess, first: int, last: int) -> Bracket:
    """The largest number from `first` to `last` at which `trial` holds; each is tried at most
    once."""
    search = _Search(trial, guess, last)
    start = search.try_near(first, first - 1, None)
    if start is None or not search.answers[start]:
        return Bracket(None, start)
    return search.close_in(start)


class _Search:
    def __init__(self, trial: Trial, guess: Guess, last: int) -> None:
        self._trial, self._guess, self._last = trial, guess, last
        self.answers: dict[int, bool | None] = {}

    def close_in(self, low: int) -> Bracket:
        ceiling = self._last + 1  # nothing is tried from here on
        high: int | None = None  # the ceiling, if a trial refuted it
        guesses_in_a_row = 0
        while ceiling - low > 1:
            candidate = self._candidate(low, high, ceiling, halve=guesses_in_a_row > 2)
            width = ceiling - low
            told = self.try_near(candidate, low, ceiling)
            if told is None:
                if high is not None and all(self.answers.get(number, False) is None
                                            for number in range(low + 1, high)):
                    break  # all numbers between were tried, and none has an answer
                ceiling, high = min(self._untold_near(candidate, low)), None
                continue
            if self.answers[told]:
                low = told
            else:
                ceiling = high = told
            slow = high is not None and 2 * (ceiling - low) > width
            guesses_in_a_row = guesses_in_a_row + 1 if slow else 0
        return Bracket(low, high)

    def _candidate(self, low: int, high: int | None, ceiling: int, *, halve: bool) -> int:
        if halve:
            return (low + ceiling) // 2
        target = self._guess()
        if target is None or (high is not None and target >= high):  # no guess, or refuted
            target = 2 * low if high is None else (low + high) / 2
        farthest = ceiling - 1 if high is not None else min(ceiling - 1, _FARTHEST * low)
        return max(low + 1, min(int(min(target, 2.0 ** 62)), farthest))

    def try_near(self, number: int, low: int, ceiling: int | None) -> int | None:
        """The nearest number to this one, between the two bounds, with an answer."""
        for candidate in _around(number):
            if candidate <= low or candidate > self._last or (
                    ceiling is not None and candidate >= ceiling):
                continue
            if candidate not in self.answers:
                self.answers[candidate] = self._trial(candidate)
            if self.answers[candidate] is not None:
                return candidate
        return None

    def _untold_near(self, number: int, low: int) -> list[int]:
        return [candidate for candidate in _around(number)
                if candidate > low and self.answers.get(candidate, False) is None]


def _around(number: int) -> Iterator[int]:
    yield number
    for distance in range(1, NEIGHBOURS + 1):
        yield number - distance
        yield number + distance


def secant(points: dict[int, float], limit: float) -> float | None:
    """The position at which the line through the two points nearest to `limit` reaches it; `None`
    if there is no such line or it does not rise."""
    below = sorted(number for number, value in points.items() if value <= limit)
    above = sorted(number for number, value in points.items() if value > limit)
    if below and above:
        left, right = below[-1], above[0]
    elif len(below) > 1:
        left, right = below[-2:]
    elif len(above) > 1:
        left, right = above[:2]
    else:
        return None
    rise = points[right] - points[left]
    if right <= left or rise <= 0:
        return None
    # The offset avoids rounding below an integer on the line.
    return left + (limit - points[left]) * (right - left) / rise + 1e-9
