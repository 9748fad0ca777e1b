"""How often Python looks for garbage while planning."""

import gc

import pytest

import planner
from planner._graph_capture.garbage import fewer_collections, give_back_freed_memory
from tests.support.models import BUILDERS


@pytest.mark.parametrize(("before", "within"), [
    ((700, 10, 10), (10_000, 10, 10)), ((50_000, 5, 5), (50_000, 5, 5)),
    ((0, 10, 10), (0, 10, 10))])
def test_less_often_and_as_before_afterwards(before, within):
    found = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        with fewer_collections(), fewer_collections():
            assert gc.get_threshold() == within
        assert gc.get_threshold() == before
        case, seen = BUILDERS["language_model"](layers=1), set()
        planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, time_limit=1,
                     progress=lambda message: seen.add(gc.get_threshold()))
        assert within in seen
        with pytest.raises(planner.InfeasibleBudget):
            planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, budget=1, time_limit=1)
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*found)


def test_memory_that_was_freed_is_given_back_while_what_is_held_stays():
    held = [bytes([index % 256]) * 4_000 for index in range(5_000)]
    del held[::2]
    give_back_freed_memory()
    assert all(each == bytes([(2 * index + 1) % 256]) * 4_000 for index, each in enumerate(held))
