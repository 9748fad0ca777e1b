"""What a schedule is made of: typed actions, of which there is one today, the run of an op.

An action that is no run (to store a result elsewhere, to fetch it back, to run an op in pieces) is
a class of its own beside `Run`, a member of `Action` and of `_KINDS`, and a case wherever
`assert_never` ends a match; mypy then names what else takes every action for a run.

A run *is* the number of its op: a schedule of runs is a tuple of numbers, and equals one.  The
algorithms work on such *orders* of bare numbers; `as_schedule` and `as_order` are the border.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import TypeAlias

from solvers.errors import IllegalSchedule


class Run(int):
    """Run the op of this number: for the first time, or again."""

    __slots__ = ()


Action: TypeAlias = Run
"""Every kind of action."""

Schedule: TypeAlias = tuple[Action | int, ...]
"""Actions in the order in which they happen; a bare number stands for the run of that op, and an op
that runs again is recomputed."""

Order: TypeAlias = tuple[int, ...]
"""A schedule of runs alone, as bare numbers of ops."""

_KINDS = frozenset({int, Run})


def known_actions(schedule: Iterable[Action | int]) -> Schedule:
    """The actions of `schedule`; raises `IllegalSchedule` for what is none."""
    actions = tuple(schedule)
    if _KINDS.issuperset(map(type, actions)):
        return actions
    known: list[Action | int] = []
    for position, action in enumerate(actions):
        try:  # any other whole number, such as one of numpy, stands for a run, too
            known.append(action if type(action) in _KINDS else Run(index(action)))
        except TypeError:
            raise IllegalSchedule(f"position {position} holds {action!r}, which is no known "
                                  "action: expected a run, or the number of an op") from None
    return tuple(known)


def as_schedule(actions: Iterable[Action | int]) -> tuple[Action, ...]:
    """The same with every action typed."""
    return tuple(action if isinstance(action, Run) else Run(action)
                 for action in known_actions(actions))


def as_order(schedule: Iterable[Action | int]) -> Order:
    """The numbers of the ops in the order in which they run."""
    return tuple(map(int, known_actions(schedule)))
