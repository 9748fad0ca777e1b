"""The largest batch and the longest sequence: exact, in few captures, and clear about mistakes."""

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.module_forward import forward_override
from planner.api import capture
from planner.sizes.sized_steps import factory_of
from tests.support.sized_models import Net, make_inputs, mean_square


def look(model=None, inputs=make_inputs, **options):
    settings = {"budget": "300kB", "loss_fn": mean_square, "time_limit": 2.0, "solver": "dp",
                **options}
    return planner.max_batch_size(Net() if model is None else model, inputs, **settings)


def step_of(batch, model=None):
    return capture(Net() if model is None else model, make_inputs(batch), loss_fn=mean_square)


@pytest.fixture(scope="module")
def found():
    return look()


def test_the_found_batch_fits_today_and_the_next_does_not(found):
    assert step_of(found.plain).baseline_peak_bytes == found.plain_peak_bytes <= 300_000
    assert found.plain_next == found.plain + 1
    assert step_of(found.plain_next).baseline_peak_bytes == found.plain_next_peak_bytes > 300_000


@pytest.mark.slow
def test_the_found_batch_fits_with_the_plan_and_the_next_with_none(found):
    assert found.planned > found.plain and found.growth == found.planned / found.plain
    assert found.plan.peak_bytes <= found.plan.budget_bytes == 300_000
    applied = found.plan.apply(Net())
    assert applied(torch.zeros(found.planned, 32)).shape == (found.planned, 32)
    with pytest.raises(planner.InfeasibleBudget):
        planner.plan(Net(), make_inputs(found.planned_next), budget="300kB", loss_fn=mean_square,
                     time_limit=2.0, solver="dp")
    assert found.planned_next == found.planned + 1


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 7])
def test_inputs_of_any_batch_stand_for_a_function(found, batch):
    largest = look(inputs=make_inputs(batch), smallest=found.planned, largest=found.planned + 1)
    assert (largest.planned, largest.plan.peak_bytes) == (found.planned, found.plan.peak_bytes)
    earlier = planner.max_batch_size(make_inputs(batch), Net(), budget="300kB", plan=False,
                                     loss_fn=mean_square)
    assert earlier.plain == found.plain


def test_lengths_are_those_of_the_second_dimension_and_of_masks():
    given = {"ids": torch.arange(12).view(2, 6), "mask": torch.ones(2, 1, 6, 6).bool(),
             "image": torch.randn(2, 6, 6), "scale": torch.ones(()), "name": "x"}
    made = factory_of(nn.Identity(), given, "sequence")(8)
    assert {key: tuple(value.shape) for key, value in made.items() if key != "name"} == {
        "ids": (2, 8), "mask": (2, 1, 8, 8), "image": (2, 8, 6), "scale": ()}
    assert made["ids"][0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1] and made["name"] == "x"
    made = factory_of(nn.Identity(), given, "batch")(1)
    assert made["mask"].shape == (1, 1, 6, 6) and made["image"].shape == (1, 6, 6)
    with pytest.raises(ValueError, match="no tensor of the inputs has a dimension 1"):
        factory_of(nn.Identity(), torch.ones(3), "sequence")


@pytest.mark.slow
def test_the_best_solver_finds_no_smaller_ones(found):
    best = look(solver="auto", smallest=found.planned)
    assert best.planned >= found.planned and best.plan.peak_bytes <= 300_000
    assert best.proven or best.planned_next_minimum_bytes > 300_000


def test_few_sizes_are_captured(found):
    assert found.captures <= 10 and not found.skipped


def test_the_report(found):
    assert str(found.planned) in str(found) and "today" in str(found)
    as_dict = found.to_dict()
    assert as_dict["planned"]["largest"] == found.planned
    assert as_dict["plain"]["next_peak_bytes"] == found.plain_next_peak_bytes


@pytest.mark.slow
def test_a_limit_on_extra_time_is_kept(found):
    low, high = found.plain, found.planned
    slower = look(overhead=0.1, smallest=low, largest=low + 40)
    assert low <= slower.planned <= high and slower.plan.overhead <= 0.1
    middle = (low + high) // 2
    with pytest.raises(planner.InfeasibleBudget, match="allow more overhead") as caught:
        look(overhead=0.0, smallest=middle, largest=middle, solver="auto")
    assert caught.value.minimum_bytes > 300_000


@pytest.mark.slow
def test_multiples_and_the_end_of_the_range(found):
    start = found.plain // 8 * 8
    by_eight = look(multiple_of=8, plan=False, smallest=start)
    assert by_eight.plain == start and by_eight.plain_next == by_eight.plain + 8
    assert by_eight.plan is None and by_eight.planned is None and by_eight.growth is None
    short = look(smallest=found.plain - 3, largest=found.plain - 3)
    assert short.plain == short.planned == found.plain - 3
    assert short.plain_next is None and short.planned_next is None
    assert "not tried" in str(short)


@pytest.mark.slow
def test_sizes_that_cannot_be_captured_are_passed_over_with_the_reason(found):
    model = Net(refuses=lambda batch: batch % 2 == 1)
    even = look(model, plan=False, smallest=found.plain // 2 * 2 - 2)
    assert even.plain == found.plain // 2 * 2
    assert any("no batches of" in reason for _, reason in even.skipped)
    assert "passed over" in str(even)


def test_a_model_that_takes_no_batch_is_told():
    with pytest.raises(planner.CaptureError, match="no batches of 1"):
        look(Net(refuses=lambda batch: True))


@pytest.mark.slow
def test_a_loss_with_labels_is_made_for_each_size():
    def make_loss(batch):
        labels = torch.zeros(batch, dtype=torch.long)
        return lambda output: nn.functional.cross_entropy(output, labels)

    found = look(loss_fn=None, make_loss_fn=make_loss, plan=False, smallest=8, largest=9)
    assert found.plain == 9
    with pytest.raises(ValueError, match="not both"):
        look(make_loss_fn=make_loss)


def test_the_longest_sequence():
    def inputs(length):
        return torch.empty(2, length, 32, device="meta")

    found = planner.max_sequence_length(Net(), inputs, budget="300kB", loss_fn=mean_square,
                                        plan=False, smallest=32, largest=512)
    assert found.what == "sequence" and found.plain_next == found.plain + 1
    longest = capture(Net(), inputs(found.plain), loss_fn=mean_square)
    assert longest.baseline_peak_bytes == found.plain_peak_bytes


def test_a_budget_under_the_resident_bytes_names_what_is_needed():
    resident = step_of(1).resident_bytes
    with pytest.raises(planner.InfeasibleBudget, match="no batch from 1 on fits") as caught:
        look(budget=resident - 1)
    assert caught.value.minimum_bytes > resident and "aten" in caught.value.bottleneck
    with pytest.raises(planner.InfeasibleBudget, match="plain step of 1 takes"):
        look(budget=resident - 1, plan=False)


@pytest.mark.slow
def test_a_range_in_which_nothing_fits():
    with pytest.raises(planner.InfeasibleBudget, match="no batch from 5000 on fits"):
        look(smallest=5000, largest=6000)


@pytest.mark.parametrize(("inputs", "error", "message"), [
    (lambda batch: [torch.ones(batch, 32)], TypeError, r"make_inputs\(1\) returned no inputs"),
    (lambda batch: "nonsense", TypeError, r"make_inputs\(1\) returned no inputs"),
    (lambda batch: None, TypeError, "got None"),
    (lambda batch: torch.ones(4, 32), ValueError, "same shapes"),
    (lambda batch: torch.ones(batch, 33), planner.CaptureError, "could be captured at no batch"),
    (lambda batch: 1 / 0, planner.CaptureError, "ZeroDivisionError"),
    (3, TypeError, "or a function from a batch size to inputs"),
])
def test_a_batch_function_that_returns_nonsense(inputs, error, message):
    with pytest.raises(error, match=message):
        look(inputs=inputs)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"budget": None}, ValueError, "a budget is needed"),
    ({"budget": "60%"}, ValueError, "percentage"),
    ({"budget": "lots"}, ValueError, "lots"),
    ({"overhead": -0.1}, ValueError, "overhead"),
    ({"overhead": "35%"}, TypeError, "overhead"),
    ({"smallest": 0}, ValueError, "smallest"),
    ({"smallest": 5, "largest": 4}, ValueError, "smallest must not exceed largest"),
    ({"largest": 2.5}, TypeError, "largest"),
    ({"multiple_of": 0}, ValueError, "multiple_of"),
    ({"time_limit": 0}, ValueError, "time_limit"),
    ({"make_loss_fn": 3}, TypeError, "make_loss_fn"),
    ({"backend": "inductor"}, ValueError, "use backend='eager'"),
])
def test_wrong_arguments_are_told(options, error, message):
    with pytest.raises(error, match=message):
        look(**options)


def test_the_plan_serves_smaller_batches_without_another_trace(found):
    assert found.plan.ranges == {"batch": (2, found.planned)}
    assert found.plan.peak_bytes_at(batch=found.planned) == found.plan.peak_bytes
    applied = found.plan.apply(Net())
    for batch in (found.planned, found.planned - 1, 2):
        assert applied(torch.zeros(batch, 32)).shape == (batch, 32)
    code, = forward_override(applied)._codes.values()
    assert code.compilations == 1


@pytest.mark.slow
def test_a_model_that_fixes_its_batch_is_captured_size_by_size():
    class Fixed(Net):
        def forward(self, inputs):
            hidden = super().forward(inputs)
            return hidden * torch.ones(len(range(inputs.shape[0])))[:, None]

    found = look(Fixed(), smallest=16, largest=24, multiple_of=8)
    assert found.plan.ranges == {}
