"""Symmetry classes of ops: those that a time-cut model need not distinguish.

Ops at the same place of a run (`solvers.repetition`) are of one class if all cuts see them alike:
made before the same cuts, wanted and demanded in the same stages, none of them read or made by the
op at a cut.  A model may then count the recomputed members of a class instead of deciding on each.

Adding up the rows of a class is a relaxation, so a bound on the counts is one for every schedule,
for any classes; their symmetry only keeps it sharp.  With one cut nothing is lost: rows that
compare two variables split into whole solutions again, by giving the n-th of each class the value
that the counts have for the n-th (level sets).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from planner.solvers.problem import Problem
from planner.solvers.repetition import Run


@dataclass(frozen=True, slots=True)
class SymmetryClasses:
    """A partition of the ops; storages follow the ops that make them."""

    of_op: tuple[int, ...]
    """The first member of each op's class."""
    of_storage: tuple[int, ...]
    """The first member of each storage's class."""
    members: dict[int, tuple[int, ...]]
    """By first member, the ops of a class, ascending."""
    storages: dict[int, tuple[int, ...]]
    """By first member, the storages of a class, by producer."""


def symmetry_classes(
    problem: Problem, runs: Sequence[Run], cuts: Sequence[int], seen: Sequence[Collection[int]],
    seen_ops: Sequence[Collection[int]], alone: Collection[int],
) -> SymmetryClasses:
    """Return the coarsest classes whose members are made between the same cuts, are in the same
    sets of `seen_ops`, and have outputs in the same sets of storages `seen`.  Each op in `alone`
    has a class of its own."""
    places: dict[int, Hashable] = {}
    for number, run in enumerate(runs):
        for op in range(run.start, run.stop):
            if op not in alone:
                places[op] = (number, (op - run.start) % run.period, bisect_left(cuts, op))
    marks: defaultdict[int, list[int]] = defaultdict(list)
    op_marks: defaultdict[int, list[int]] = defaultdict(list)
    for noted, sets in ((marks, seen), (op_marks, seen_ops)):
        for number, members in enumerate(sets):
            for member in members:
                noted[member].append(number)
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, described in enumerate(problem.ops):
        if index in places:
            groups[places[index], tuple(op_marks[index]),
                   tuple(tuple(marks[s]) for s in described.outputs)].append(index)
        else:
            groups[index].append(index)
    of_op = [0] * len(problem)
    of_storage = [0] * len(problem.storages)
    storages_of: dict[int, tuple[int, ...]] = {}
    for group in groups.values():
        for candidate, first in enumerate(problem.ops[group[0]].outputs):
            storages_of[first] = tuple(problem.ops[op].outputs[candidate] for op in group)
            for storage in storages_of[first]:
                of_storage[storage] = first
        for op in group:
            of_op[op] = group[0]
    members = {group[0]: tuple(group) for group in groups.values()}
    return SymmetryClasses(tuple(of_op), tuple(of_storage), members, storages_of)
