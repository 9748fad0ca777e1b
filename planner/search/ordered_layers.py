"""Schedules whose decisions change from layer to layer as seldom as can be.

The solver may save one kind of result in the 2nd, 5th and 9th of a dozen layers that are alike,
where any three would do.  Three in a row leave stretches of layers that are treated alike, and what
is generated for one of a stretch is known of the others (`graph_capture.inductor.shortened`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from functools import cached_property

from planner.search.saving import schedule_saving
from planner.step.form import Form
from solvers.repetition import runs_of
from solvers.simulator import simulate

_COST = 2e-4
"""Part of the step's time that it may cost."""


class LayerOrder:
    """The results of one form that are alike but for the layer that makes them."""

    def __init__(self, form: Form) -> None:
        self._form = form

    @cached_property
    def _alike(self) -> tuple[tuple[int, ...], ...]:
        """Buffers of the same place in layers that repeat, by layer."""
        found: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        for number, run in enumerate(runs_of(self._form.problem)):
            for index in range(run.start, run.stop):
                for slot, buffer in enumerate(self._form.problem.ops[index].outputs):
                    found[number, (index - run.start) % run.period, slot].append(buffer)
        return tuple(tuple(buffers) for buffers in found.values())

    def ordered(self, saved: Set[int], net_bytes: int) -> frozenset[int]:
        """As many results of each kind as `saved` holds, in layers one after the other, as far as
        that takes no more than `net_bytes`, or than it took, and hardly more time."""
        form = self._form
        before = simulate(form.problem, schedule_saving(form, saved))
        most_bytes = max(net_bytes, before.peak_bytes)
        most_cost = before.cost + _COST * form.problem.keep_all_cost

        def is_as_good(choice: frozenset[int]) -> bool:
            after = simulate(form.problem, schedule_saving(form, choice))
            return after.peak_bytes <= most_bytes and after.cost <= most_cost

        best = frozenset(saved)
        for late in (True, False):
            choice = best
            for alike, count in self._mixed(best):
                choice = choice.difference(alike).union(alike[-count:] if late else alike[:count])
            if is_as_good(choice):
                return choice
        for alike, count in self._mixed(best):
            for layers in (alike[-count:], alike[:count]):
                choice = best.difference(alike).union(layers)
                if is_as_good(choice):
                    best = choice
                    break
        return best

    def _mixed(self, saved: Set[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Of which kinds some results are saved, and how many."""
        for alike in self._alike:
            count = sum(buffer in saved for buffer in alike)
            if 0 < count < len(alike):
                yield alike, count
