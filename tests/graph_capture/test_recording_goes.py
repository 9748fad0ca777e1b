"""What planning leaves in memory: torch keeps what was compiled for a model's own code, where the
graph breaks in it, but none of what the recorded step computed."""

import gc

import pytest
import torch

import planner
from planner._graph_capture.dynamo.record import Recording
from tests.support.models import BUILDERS


@pytest.mark.parametrize("name", ["graph_break", "language_model"])
def test_a_recorded_step_goes_when_its_plan_is_made(name):
    case = BUILDERS[name](layers=2)
    planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, budget="90%", time_limit=1)
    gc.collect()
    assert not [found for found in gc.get_objects() if isinstance(found, Recording)]


def test_nothing_of_the_size_of_a_batch_stays():
    case = BUILDERS["graph_break"](layers=2)
    model = planner.within(case.model, "90%", time_limit=1)

    def held() -> set[int]:
        gc.collect()
        return {found.untyped_storage().data_ptr() for found in gc.get_objects()
                if type(found) is torch.Tensor and found.device.type == "cpu"
                and found.nbytes > 64 and not found.is_sparse}

    def step() -> None:
        output = model(*case.args, **case.kwargs)
        (output.sum() if case.loss_fn is None else case.loss_fn(output)).backward()
        model.zero_grad(set_to_none=True)

    before = held()
    for _ in range(2):
        step()
        assert held() <= before
