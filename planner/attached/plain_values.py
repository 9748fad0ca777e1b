"""Plain values among the arguments of calls, numbers and texts, that differ from call to call.

A value that no code reads makes no other graph: the name of a file, the number of a step.  Which
are read is found out: a call that differs from the ones before in such a value is taken for one
with the value that was met first.  Where it takes a graph of its own, several times in a row, the
value is read, and each one has a graph and plans of its own.  A number that only changes other
numbers is an input of the graph (`torch_compat.varying_numbers`).
"""

from __future__ import annotations

import logging
from collections import Counter

from planner._apply.call_signature import Call

log = logging.getLogger("planner")

_MOST_READ = 3
"""Graphs with values of their own after which a value is taken for one that is read: sizes may be
new as well."""


class PlainValues:
    """What is known of the values of one model's arguments.  Mutable."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._first: dict[str, str] = {}
        self._read: Counter[str] = Counter()
        self._changed: frozenset[str] = frozenset()
        self.given: Call | None = None
        """The running call as it is."""

    @property
    def are_on_trial(self) -> bool:
        """True if the running call is taken for one with other values."""
        return bool(self._changed)

    def begin(self, call: Call, *, may_try: bool) -> Call:
        """The call to take a call for.  `may_try`: it may turn out to be another one."""
        values, self.given = call.values, call
        for name, value in values.items():
            self._first.setdefault(name, value)
        self._changed = frozenset(
            name for name, value in values.items() if may_try and value != self._first[name]
            and self._read[name] < _MOST_READ)
        return call.with_values({name: self._first[name] for name in self._changed})

    def note(self, *, is_read: bool) -> None:
        """Note whether the running call took a graph with its own values."""
        for name in self._changed:
            self._read[name] = self._read[name] + 1 if is_read else 0
            if self._read[name] == _MOST_READ:
                log.warning(
                    "%s: the argument %s has other values from call to call, and the model's code "
                    "reads it: each value is captured and planned by itself, which takes seconds. "
                    "Give a tensor in place of a number that changes in each step", self._model,
                    name)
