"""Schedules that treat more of the repeated blocks alike, so that less code is compiled.

The solver's optimum may treat every block a little differently, and each difference is code that
takes seconds to compile.  What is known of a block is which of its results are saved; the rarest
choice is given up first, for that of other blocks which costs the least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set

from graph_capture.training_graph import Region, TrainingGraph
from planner.search.saving import saved_buffers, schedule_saving
from planner.step.form import Form
from solvers.problem import Schedule
from solvers.simulator import simulate

_Choice = frozenset[tuple[int, int]]
"""What is saved of a region: position of an op in its forward, number of the op's output."""
_Shape = tuple[object, ...]
"""What two regions have in common that may be treated alike."""


def unify_blocks(form: Form, schedule: Schedule, *, net_peak_bytes: int, cost: float) -> Schedule:
    """A schedule that saves in fewer different ways, as far as it takes at most `net_peak_bytes`
    and `cost`; without repeated regions `schedule` itself."""
    graph = form.graph
    choices = _choices(graph, saved_buffers(form, schedule))
    shapes = [_shape(graph, region) for region in graph.regions]
    best = schedule
    is_simpler = True
    while is_simpler:
        is_simpler = False
        for mergers in _mergers(choices, shapes):
            tried: list[tuple[float, int, Schedule, list[_Choice]]] = []
            for merged in mergers:
                again = schedule_saving(form, _saved(graph, merged))
                result = simulate(form.problem, again)
                if result.peak_bytes <= net_peak_bytes and result.cost <= cost:
                    tried.append((result.cost, len(tried), again, merged))
            if tried:
                *_, best, choices = min(tried)
                is_simpler = True
                break
    return best


def _mergers(choices: list[_Choice], shapes: list[_Shape]) -> Iterator[list[list[_Choice]]]:
    """For each choice, that of the fewest regions first, the choices with it replaced by
    another's."""
    kinds = list(zip(shapes, choices, strict=True))
    counts = Counter(kinds)
    for shape, rare in sorted(counts, key=counts.__getitem__):
        yield [[other if kind == (shape, rare) else kind[1] for kind in kinds]
               for other_shape, other in counts if other_shape == shape and other != rare]


def _choices(graph: TrainingGraph, saved: Set[int]) -> list[_Choice]:
    return [frozenset((position, number) for position, index in enumerate(region.forward)
                      for number, buffer in enumerate(graph.ops[index].outputs)
                      if buffer in saved)
            for region in graph.regions]


def _saved(graph: TrainingGraph, choices: list[_Choice]) -> frozenset[int]:
    return frozenset(graph.ops[region.forward[position]].outputs[number]
                     for region, choice in zip(graph.regions, choices, strict=True)
                     for position, number in choice)


def _shape(graph: TrainingGraph, region: Region) -> _Shape:
    ops = (graph.ops[index] for part in (region.forward, region.backward) for index in part)
    return tuple((op.target, op.pinned, tuple(graph.buffers[b].size_bytes for b in op.outputs))
                 for op in ops if op.digest)
