"""Scheduling problems of a known structure: chains, and layers that repeat."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

from planner.solvers.problem import Op, Problem, Segment, Storage
from planner.solvers.repetition import Run, runs_of


def training_chain(layers: int, size: int = 10) -> Problem:
    """Layer i reads activation i-1; its backward reads the gradient and that activation."""
    ops = [Op(f"forward{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(layers)]
    storages = [Storage(size, i) for i in range(layers)]
    for i in reversed(range(layers)):
        index = len(ops)
        gradient = (index - 1,) if index > layers else (layers - 1,)
        activation = (i - 1,) if i else ()
        ops.append(Op(f"backward{i}", 2.0, gradient + activation, (index,), recomputable=False))
        storages.append(Storage(size, index))
    return Problem(tuple(ops), tuple(storages))


def without_replay_state(problem: Problem) -> Problem:
    return replace(problem, ops=tuple(replace(op, replay_state_bytes=0) for op in problem.ops))


@st.composite
def repeated(draw: st.DrawFn, times: int = 3) -> Problem:
    """Draw a stretch of forward ops several times in a row, each reading the result of the one
    before, then a backward that reads all of it in the opposite order."""
    length = draw(st.integers(1, 3))
    described = [(float(draw(st.integers(0, 5))), draw(st.integers(0, 6)), draw(st.integers(1, 2)))
                 for _ in range(length)]
    ops = [Op("start", 1.0, (), (0,), recomputable=draw(st.booleans()))]
    storages = [Storage(draw(st.integers(0, 6)), 0)]
    for _ in range(times):
        for cost, size, reads in described:
            index = len(ops)
            inputs = tuple(s for s in range(index - 1, index - 1 - reads, -1) if s >= 0)
            ops.append(Op("forward", cost, inputs, (index,)))
            storages.append(Storage(size, index))
    forward = len(ops)
    for storage in reversed(range(forward)):
        if draw(st.integers(0, 3)):
            index = len(ops)
            gradient = (index - 1,) if index > forward else ()
            ops.append(Op("backward", 1.0, (*gradient, storage), (index,), recomputable=False))
            storages.append(Storage(draw(st.integers(0, 3)), index))
    segments = (Segment(0, ()), Segment(forward, (0,))) if len(ops) > forward else (
        Segment(0, (0,)),)
    return Problem(tuple(ops), tuple(storages), segments)


def all_runs(problem: Problem) -> tuple[Run, ...]:
    """Return runs of any length: any of them must give a valid bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.solvers.repetition.LEAST_SPARED", 1)
        return runs_of(problem)
