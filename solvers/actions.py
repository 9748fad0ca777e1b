"""Typed actions of a schedule: the run of an op and the transfers of a storage.

A transfer consists of three actions.  `Store` begins a copy to the host.  `Release` waits for its
end; from then on the copy no longer keeps the device's memory alive.  `Fetch` allocates memory on
the device and begins the copy back; the first reader waits for its end.  Memory therefore changes
only at actions, however long the copies last.

A new kind of action is a class next to these, a member of `Action`, and a case wherever
`assert_never` ends a match; mypy then names every place that lacks the case.

A run *is* the number of its op: a schedule of runs is a tuple of numbers and compares equal to one.
The algorithms work on such *orders* of bare numbers; `as_schedule` and `as_order` convert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias, get_args

from planner.solvers.errors import IllegalSchedule


class Run(int):
    """Run the op of this number, for the first time or again."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Store:
    """Begin to copy the latest result in this storage to the host."""

    storage: int


@dataclass(frozen=True, slots=True)
class Release:
    """Wait until the copy of this storage to the host has ended.  The storage then uses no memory
    of the device unless an op still reads it."""

    storage: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Allocate memory of the device for this storage and begin to copy it back from the host."""

    storage: int


Transfer: TypeAlias = Store | Release | Fetch
"""Action that moves a storage and runs no op."""

Action: TypeAlias = Run | Transfer
"""Every kind of action."""

Schedule: TypeAlias = tuple[Action | int, ...]
"""Actions in the order in which they happen.  A bare number is the run of that op; an op that runs
again is recomputed."""

Order: TypeAlias = tuple[int, ...]
"""A schedule of runs only, as bare numbers of ops."""

_KINDS = (int, *get_args(Action))


def known_actions(schedule: Iterable[Action | int]) -> Schedule:
    """Return the actions of `schedule`; raise `IllegalSchedule` for anything else."""
    actions: tuple[Any, ...] = tuple(schedule)
    if set(map(type, actions)).issubset(_KINDS):
        return actions
    known: list[Action | int] = []
    for position, action in enumerate(actions):
        try:  # any other integer, such as one of numpy, is a run, too
            known.append(action if isinstance(action, _KINDS) else Run(index(action)))
        except TypeError:
            raise IllegalSchedule(f"position {position} holds {action!r}, which is no known "
                                  "action: expected a run, the number of an op, or a "
                                  "transfer") from None
    return tuple(known)


def as_schedule(actions: Iterable[Action | int]) -> tuple[Action, ...]:
    """Return the schedule with every action typed."""
    return tuple(Run(action) if isinstance(action, int) else action
                 for action in known_actions(actions))


def as_order(schedule: Iterable[Action | int]) -> Order:
    """Return the numbers of the ops in the order in which they run, without transfers."""
    return tuple(int(action) for action in known_actions(schedule) if isinstance(action, int))
