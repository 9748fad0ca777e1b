"""The largest whole number for which something holds, in as few trials as can be.

The model of the world: a trial is dear (a capture, a plan), what is tried holds up to some number
and not beyond, and the caller can guess where that is from the trials so far.  So guesses are
followed while they close in, and the interval is halved where they do not, or where a trial has
refuted them.  A trial may have no answer (a shape that cannot be captured): then neighbours are
tried in its place.

Blind spot: where what is tried holds again beyond a number at which it does not, the answer is one
of the boundaries: it holds there, and not at the next number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

Trial = Callable[[int], bool | None]
"""Whether it holds at a number; `None`: that cannot be told."""

Guess = Callable[[], float | None]
"""Where the largest number is expected, from the trials so far; `None`: no idea."""

NEIGHBOURS = 8
"""So many numbers next to one without an answer are tried in its place."""
_FARTHEST = 64
"""A guess beyond so many times the largest number that holds is not followed."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """Where it stops to hold."""

    low: int | None
    """The largest number found at which it holds; `None`: at none."""
    high: int | None
    """The next number above it that has an answer: it does not hold there.  `None`: `low` is the
    end of the range, or the numbers above it that were tried have no answer."""


def find_largest(trial: Trial, guess: Guess, first: int, last: int, *,
                 low: int | None = None) -> Bracket:
    """The largest number from `first` to `last` at which `trial` holds.

    `low`: a number at which it is known to hold.  Each number is tried at most once.
    """
    search = _Search(trial, guess, last)
    if low is None:
        start = search.try_near(first, first - 1, None)
        if start is None or not search.answers[start]:
            return Bracket(None, start)
        low = start
    else:
        search.answers[low] = True
    return search.close_in(low)


class _Search:
    def __init__(self, trial: Trial, guess: Guess, last: int) -> None:
        self._trial, self._guess, self._last = trial, guess, last
        self.answers: dict[int, bool | None] = {}

    def close_in(self, low: int) -> Bracket:
        ceiling = self._last + 1  # nothing is tried from here on
        high: int | None = None  # the ceiling, where a trial said so
        guesses_in_a_row = 0
        while ceiling - low > 1:
            candidate = self._candidate(low, high, ceiling, halve=guesses_in_a_row > 2)
            width = ceiling - low
            told = self.try_near(candidate, low, ceiling)
            if told is None:
                if high is not None and self._untold(range(low + 1, high)):
                    break
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
        if target is None or (high is not None and target >= high):  # no idea, or refuted
            target = 2 * low if high is None else (low + high) / 2
        farthest = ceiling - 1 if high is not None else min(ceiling - 1, _FARTHEST * low)
        return max(low + 1, min(int(min(target, 2.0 ** 62)), farthest))

    def try_near(self, number: int, low: int, ceiling: int | None) -> int | None:
        """The number nearest to this one, between the two, that has an answer."""
        for candidate in _around(number):
            if candidate <= low or candidate > self._last or (
                    ceiling is not None and candidate >= ceiling):
                continue
            if candidate not in self.answers:
                self.answers[candidate] = self._trial(candidate)
            if self.answers[candidate] is not None:
                return candidate
        return None

    def _untold(self, numbers: range) -> bool:
        """Whether all were tried and none has an answer."""
        return all(self.answers.get(number, False) is None for number in numbers)

    def _untold_near(self, number: int, low: int) -> list[int]:
        return [candidate for candidate in _around(number)
                if candidate > low and self.answers.get(candidate, False) is None]


def _around(number: int) -> Iterator[int]:
    yield number
    for distance in range(1, NEIGHBOURS + 1):
        yield number - distance
        yield number + distance


def secant(points: dict[int, float], limit: float) -> float | None:
    """Where the line through the two points nearest to `limit` reaches it; `None` where there is no
    such line or it does not rise."""
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
    # Not by a hair below a whole number that the line meets.
    return left + (limit - points[left]) * (right - left) / rise + 1e-9
