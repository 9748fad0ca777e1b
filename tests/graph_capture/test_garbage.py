"""How often Python looks for garbage while planning."""

import gc

import pytest

import planner
from planner._graph_capture.garbage import fewer_collections
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
