"""What a schedule is made of: typed actions, the run of an op and the transfers of a storage.

A transfer takes three actions.  `Store` begins a copy to the host, `Release` waits for its end,
from where on the device's memory need not be held for it, and `Fetch` takes memory on the device
anew and begins the copy back, for which the first reader waits.  So memory changes hands at actions
alone, however long the copies take.

An action of another kind is a class of its own beside these, a member of `Action`, and a case
wherever `assert_never` ends a match; mypy then names what else takes every action for one of these.

A run *is* the number of its op: a schedule of runs is a tuple of numbers, and equals one.  The
algorithms work on such *orders* of bare numbers; `as_schedule` and `as_order` are the border.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias, get_args

from planner.solvers.errors import IllegalSchedule


class Run(int):
    """Run the op of this number: for the first time, or again."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Store:
    """Begin to copy the latest result in this storage to the host."""

    storage: int


@dataclass(frozen=True, slots=True)
class Release:
    """Wait until the copy of this storage to the host has ended: it then holds no memory of the
    device that nobody else reads."""

    storage: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Take memory of the device for this storage and begin to copy it back from the host."""

    storage: int


Transfer: TypeAlias = Store | Release | Fetch
"""What moves a storage and runs nothing."""

Action: TypeAlias = Run | Transfer
"""Every kind of action."""

Schedule: TypeAlias = tuple[Action | int, ...]
"""Actions in the order in which they happen; a bare number stands for the run of that op, and an op
that runs again is recomputed."""

Order: TypeAlias = tuple[int, ...]
"""A schedule of runs alone, as bare numbers of ops."""

_KINDS = (int, *get_args(Action))


def known_actions(schedule: Iterable[Action | int]) -> Schedule:
    """The actions of `schedule`; raises `IllegalSchedule` for what is none."""
    actions: tuple[Any, ...] = tuple(schedule)
    if set(map(type, actions)).issubset(_KINDS):
        return actions
    known: list[Action | int] = []
    for position, action in enumerate(actions):
        try:  # any other whole number, such as one of numpy, stands for a run, too
            known.append(action if isinstance(action, _KINDS) else Run(index(action)))
        except TypeError:
            raise IllegalSchedule(f"position {position} holds {action!r}, which is no known "
                                  "action: expected a run, the number of an op, or a "
                                  "transfer") from None
    return tuple(known)


def as_schedule(actions: Iterable[Action | int]) -> tuple[Action, ...]:
    """The same with every action typed."""
    return tuple(Run(action) if isinstance(action, int) else action
                 for action in known_actions(actions))


def as_order(schedule: Iterable[Action | int]) -> Order:
    """The numbers of the ops in the order in which they run; transfers are left out."""
    return tuple(int(action) for action in known_actions(schedule) if isinstance(action, int))
