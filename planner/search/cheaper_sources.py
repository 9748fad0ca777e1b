"""Saved results replaced by what they are made from, where that is in memory in any case.

The model of the world: to save a pointwise result, a kernel has to write it and another has to read
it, while what is made by a library's kernel, or read by one, is written in any case.  The
normalised input of a layer takes as much memory as the input itself and the few statistics from
which the backward's kernels compute it as they read; so the input is the better one to save.  The
solver, which sees what ops cost and not what saving costs, takes either.

Blind spots: those of `graph_capture.inductor.fused_costs`.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from graph_capture.training_graph import SavingCosts
from planner.search.cheap_to_recompute import Remakes
from planner.search.saving import schedule_saving
from planner.step.form import Form
from solvers.problem import Schedule

_FARTHEST = 16
"""Ops between a result and what it is made from, at most."""
_STATISTICS = 0.1
"""Part of a result's size that its sources may take more than it does."""
_ROUNDS, _TRIED = 8, 48
"""How often it is asked what may be given up, and of how many results then, at most."""


def with_cheaper_sources(form: Form, saved: frozenset[int], costs: SavingCosts, net_bytes: int,
                         cost: Callable[[Schedule], float]) -> frozenset[int]:
    """`saved` with what takes time to save replaced by its sources, and what is cheapest to do
    without given up for these, where that costs less and takes no more than `net_bytes`, or than
    before; `cost`: of a schedule."""
    search = _Search(form, costs, cost)
    seconds, peak = search.measure(saved)
    replaced = search.replaced(saved)
    if replaced == saved or search.measure(replaced)[0] >= seconds:
        return saved
    fitted = search.fitted(replaced, max(net_bytes, peak), seconds)
    return saved if fitted is None else fitted


class _Search:
    def __init__(self, form: Form, costs: SavingCosts, cost: Callable[[Schedule], float]) -> None:
        self._form, self._costs, self._cost = form, costs, cost

    def measure(self, saved: Set[int]) -> tuple[float, int]:
        """Cost and peak of the schedule that saves so."""
        schedule = schedule_saving(self._form, saved)
        return self._cost(schedule), self._form.net_peak_bytes(schedule)

    def replaced(self, saved: frozenset[int]) -> frozenset[int]:
        """All that takes time to save replaced, what takes most first."""
        to_save = self._costs.to_save
        for buffer in sorted(saved & to_save.keys(), key=lambda b: (-to_save[b], b)):
            if to_save[buffer] > 0:
                sources = self._sources(saved, buffer)
                saved = saved if sources is None else (saved - {buffer}) | sources
        return saved

    def _sources(self, saved: frozenset[int], buffer: int) -> set[int] | None:
        """What is to be saved in the place of a buffer; `None` where that is too far, or too large.
        """
        graph, problem = self._form.graph, self._form.problem
        sources: set[int] = set()
        pending, seen = [graph.buffers[buffer].producer], set[int]()
        while pending:
            index = pending.pop()
            if index in seen:
                continue
            seen.add(index)
            if len(seen) > _FARTHEST or not problem.ops[index].recomputable:
                return None
            for source in graph.ops[index].inputs:
                if source in saved or graph.buffers[source].kept_to_end:
                    continue
                if self._costs.to_save.get(source, 0.0) > 0:
                    pending.append(graph.buffers[source].producer)
                else:
                    sources.add(source)
        size = sum(graph.buffers[source].size_bytes for source in sources)
        return sources if size <= (1 + _STATISTICS) * graph.buffers[buffer].size_bytes else None

    def fitted(self, saved: frozenset[int], limit_bytes: int, limit_seconds: float
               ) -> frozenset[int] | None:
        """`saved` less what costs least to do without, for what it frees, until the step takes at
        most `limit_bytes`; `None` where that costs `limit_seconds` or more, or is not found."""
        seconds, peak = self.measure(saved)
        for _ in range(_ROUNDS):
            if peak <= limit_bytes:
                break
            prices = []
            for buffer in self._dispensable(saved, peak - limit_bytes):
                dearer, lower = self.measure(saved - {buffer})
                if lower < peak:
                    prices.append(((dearer - seconds) / (peak - max(lower, limit_bytes)), buffer))
            if not prices:
                return None
            cheapest = min(prices)[0]
            for price, buffer in sorted(prices):
                if peak <= limit_bytes or price > max(2 * cheapest, 0.0):
                    break
                dearer, lower = self.measure(saved - {buffer})
                if lower < peak:
                    saved, seconds, peak = saved - {buffer}, dearer, lower
        return saved if peak <= limit_bytes and seconds < limit_seconds else None

    def _dispensable(self, saved: frozenset[int], size_bytes: int) -> list[int]:
        """Of what is saved, and not far smaller than `size_bytes`, what is likely to cost least for
        its size."""
        buffers, remakes = self._form.graph.buffers, Remakes(self._form, saved, self._costs)
        most = self._form.problem.keep_all_cost

        def price(buffer: int) -> float:
            seconds = remakes.seconds(buffer, most) - self._costs.to_save.get(buffer, 0.0)
            return seconds / min(buffers[buffer].size_bytes, size_bytes)

        large = [buffer for buffer in saved if buffers[buffer].size_bytes > size_bytes / 10]
        return sorted(large, key=lambda buffer: (price(buffer), buffer))[:_TRIED]
