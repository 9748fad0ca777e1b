"""The choices for an effective batch: within the budget, best first, held by real steps."""

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.memory.allocator import record_peak
from tests.support.sized_models import Net, make_inputs, mean_square

BUDGET = 220_000


def look(model=None, **options):
    settings = {"budget": BUDGET, "effective_batch": 288, "loss_fn": mean_square,
                "time_limit": 1.0, "solver": "dp", **options}
    return planner.advise(Net() if model is None else model, make_inputs, **settings)


@pytest.fixture(scope="module")
def advice():
    return look()


def test_the_choices_fit_and_the_fastest_comes_first(advice):
    seconds = [choice.seconds_per_sample for choice in advice.choices]
    assert seconds == sorted(seconds) and advice.best is advice.choices[0]
    for choice in advice.choices:
        assert choice.peak_bytes <= BUDGET
        assert choice.micro_batch * choice.accumulation == 288
        assert (choice.plan is None) == (choice.overhead == 0)
    assert {choice.plan is None for choice in advice.choices} == {True, False}


def test_larger_micro_batches_need_a_plan(advice):
    plain = max(c.micro_batch for c in advice.choices if c.plan is None)
    assert all(c.micro_batch > plain for c in advice.choices if c.plan is not None)


def test_the_report(advice):
    assert "micro-batch" in str(advice) and str(advice.best.micro_batch) in str(advice)
    rows = advice.to_dict()["choices"]
    assert [row["micro_batch"] for row in rows] == [c.micro_batch for c in advice.choices]
    assert [row["planned"] for row in rows] == [c.plan is not None for c in advice.choices]


def test_real_micro_batches_after_the_first_take_what_is_predicted(advice):
    for planned in (False, True):
        choice = next(c for c in advice.choices if (c.plan is not None) == planned
                      and c.accumulation > 1)
        model = Net()
        runs = choice.plan.apply(model) if planned else model
        batch = torch.zeros(choice.micro_batch, 32)

        def step(runs=runs, batch=batch):
            mean_square(runs(batch)).backward()

        step()
        held = sum(p.numel() * p.element_size() * 2 for p in model.parameters())
        measured = held + batch.numel() * 4 + record_peak(step, "cpu").peak_bytes
        assert measured == pytest.approx(choice.peak_bytes, rel=0.01)
        assert measured <= BUDGET


def test_without_accumulation_no_gradients_are_there_before(advice):
    whole = look(effective_batch=1)
    assert whole.best.accumulation == 1
    assert whole.best.peak_bytes == planner.plan(
        Net(), make_inputs(1), loss_fn=mean_square).baseline_peak_bytes
    assert len(whole.choices) == 1


def test_what_is_impossible_says_what_is_needed():
    with pytest.raises(planner.InfeasibleBudget, match="not even micro-batches of 1") as caught:
        look(budget=20_000, effective_batch=4)
    assert caught.value.minimum_bytes > 20_000
    with pytest.raises(planner.CaptureError, match="could be captured at no divisor"):
        look(Net(refuses=lambda batch: True), effective_batch=2)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"effective_batch": 0}, ValueError, "effective_batch"),
    ({"effective_batch": 2.0}, TypeError, "effective_batch"),
    ({"budget": "50%"}, ValueError, "percentage"),
    ({"budget": None}, ValueError, "a budget is needed"),
    ({"cost_model": "flops"}, ValueError, "roofline"),
    ({"backend": "inductor"}, ValueError, "use backend='eager'"),
    ({"solver": "magic"}, ValueError, "solver"),
])
def test_wrong_arguments_are_told(options, error, message):
    with pytest.raises(error, match=message):
        look(**options)


def test_a_model_of_one_class_is_no_model():
    with pytest.raises(TypeError, match="must be a torch"):
        planner.advise(nn.Linear, make_inputs, effective_batch=4, budget=BUDGET)
