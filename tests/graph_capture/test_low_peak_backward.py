"""A backward with copies: the same gradients, a smaller peak, and a price that is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.joint_graph.low_peak_backward import late_parts, lower_backward_peak
from planner.search.eager import make_plan, schedule_within
from planner.search.planning import Effort, plan_within
from planner.search.variants import cheapest
from planner.solvers.errors import InfeasibleBudget
from planner.solvers.minimum import minimum_peak, working_set_floor
from planner.solvers.simulator import simulate
from planner.solvers.solve import solve
from tests.support.models import Case, gpt2, unet
from tests.support.regions import joint_graph
from tests.support.training import (
    apply_schedule,
    captured,
    measured_peak,
    random_schedule,
    reference,
    train,
)

ROWS, WIDTH = 64, 32
PART_BYTES = 4 * ROWS * WIDTH


class Joined(nn.Module):
    """`x * skip` joined to a chain of products with the result; the skip is read last."""

    def __init__(self, steps: int, skip_share: int = 1) -> None:
        super().__init__()
        self.skip = nn.Parameter(torch.rand(WIDTH * skip_share))
        self.steps = nn.ParameterList(torch.rand(WIDTH) for _ in range(steps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x.repeat(1, self.skip.numel() // WIDTH) * self.skip
        y = start[:, :WIDTH]
        for step in self.steps:
            y = torch.tanh(y * step)
        return (torch.cat([start, y], 1).sin() * 2).sum()


def parts_of(model: nn.Module) -> list[tuple[int, ...]]:
    joint = joint_graph(model, torch.rand(ROWS, WIDTH), loss_fn=lambda loss: loss)
    return [tuple(node.meta["val"].shape) for node in late_parts(joint)]


def channels_last(case: Case) -> Case:
    """The case in the layout in which a CPU's convolutions copy nothing.  Its loss makes a gradient
    in that layout, too: AOTAutograd copies one that comes in another, and sums in another order."""
    (images,) = case.args
    images = images.contiguous(memory_format=torch.channels_last)
    wanted = torch.rand_like(images)
    return Case(case.model.to(memory_format=torch.channels_last), (images,),
                lambda logits: (logits * wanted).sum())


def test_what_is_read_late_is_found():
    assert parts_of(Joined(4)) == [(ROWS, WIDTH)]


def test_what_is_read_soon_is_left_alone():
    class Outside(Joined):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x * self.skip, x * self.steps[0]], 1).sin().sum()

    assert parts_of(Outside(1)) == []


def test_more_than_half_of_the_whole_is_left_alone():
    assert parts_of(Joined(4, skip_share=2)) == []


def test_a_gradient_that_the_backward_returns_is_left_alone():
    class Given(Joined):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.requires_grad_())

    joint = joint_graph(Given(4), torch.rand(ROWS, WIDTH), loss_fn=lambda loss: loss)
    returned = joint.output.args[0]
    assert not {part.args[0] for part in late_parts(joint)} & set(returned)


@pytest.mark.slow
def test_a_transformer_has_nothing_to_copy():
    assert len(captured(gpt2(layers=2)).variants) == 1


@pytest.mark.parametrize("layout", [
    lambda case: case, pytest.param(channels_last, marks=pytest.mark.slow)])
def test_gradients_and_peaks_of_low_peak_steps(layout):
    case = layout(unet(image=32))
    step = captured(case)
    _, low_peak = step.variants
    assert low_peak.low_peak
    expected = reference(case)
    for seed in range(3):
        schedule = (low_peak.problem.keep_all_schedule if seed == 0
                    else random_schedule(low_peak.problem, seed, 0.5))
        planned, timeline = apply_schedule(case, step, schedule, low_peak)
        assert train(planned, case).differences(expected) == []
        assert measured_peak(planned, case) == timeline.peak_bytes


def test_poolings_read_a_gradient_for_the_shape_of_their_input():
    """Where the layouts are the same; the input itself may then be gone."""
    model = unet().model
    joint = joint_graph(model, torch.rand(2, 3, 32, 32), loss_fn=torch.sum)
    pool = torch.ops.aten.max_pool2d_with_indices_backward.default
    lower_backward_peak(joint)
    inputs = [node.args[1] for node in joint.graph.find_nodes(op="call_function", target=pool)]
    assert len(inputs) == 2
    assert {node.target for node in inputs} == {torch.ops.aten.clone.default}


def where_the_low_peak_step_takes_less():
    """A network, its step, the least that its low-peak variant takes, and that no schedule of the
    other takes.  It depends on the workspace of the CPU's convolutions."""
    for sizes in ({"width": 16, "depth": 1}, {"width": 16, "depth": 2}, {"width": 32, "depth": 1}):
        case = channels_last(unet(image=32, **sizes))
        step = captured(case)
        floor = working_set_floor(step.base.problem)
        low_peak = step.variants[1]
        least = low_peak.net_peak_bytes(minimum_peak(low_peak.problem))
        if least < 0.99 * floor:
            return sizes, case, step, least, floor
    raise AssertionError("no network whose low-peak variant takes less")


@pytest.mark.slow
def test_the_low_peak_step_fits_where_the_other_cannot(tmp_path):
    """Held when measured, from a file, with gradients equal to the last bit."""
    _, case, step, least, floor = where_the_low_peak_step_takes_less()
    budget = step.resident_bytes + (least + floor) // 2
    path = tmp_path / "plan.json"
    plan_within(step, budget, Effort(time_limit=4.0)).save(path)
    plan = planner.load(path)
    assert plan.spec.low_peak
    assert any("copied" in note for note in plan.notes)
    model = plan.apply(case.model)
    assert measured_peak(model, case) == plan.peak_bytes - step.resident_bytes
    assert plan.peak_bytes <= budget
    assert train(model, case).differences(reference(case)) == []
    report = planner.memory(case.model, case.inputs, loss_fn=case.loss_fn, plan=plan)
    assert report.peak_bytes >= plan.peak_bytes


def test_copies_are_counted_as_extra_time():
    step = captured(channels_last(unet()))
    low_peak = step.variants[1]
    copies = sum(op.seconds for op in low_peak.graph.ops if op.target == "aten.clone.default")
    assert copies > 0
    assert low_peak.extra_seconds == pytest.approx(copies)
    plan = make_plan(step, low_peak, None, solve(low_peak.problem, None))
    assert plan.overhead == pytest.approx(copies / step.base.graph.step_seconds)
    assert schedule_within(step, step.keep_all_peak_bytes, Effort())[0] is step.base


@pytest.mark.slow
def test_the_cheaper_form_is_taken_and_the_bound_holds_for_both():
    """At every budget, against each variant solved alone."""
    step = captured(unet(image=32, depth=1))
    high, _ = simulate(step.base.problem, step.base.problem.keep_all_schedule)
    low = working_set_floor(step.variants[1].problem)
    for share in (0.3, 0.5, 0.8):
        net = low + int(share * (high - low))
        chosen, result = cheapest(step.variants, net, Effort(time_limit=2.0))
        alone = [solve(variant.problem, net, time_limit=1.0) for variant in step.variants]
        assert result.cost <= min(one.cost for one in alone) * (1 + 1e-3)
        assert result.lower_bound <= min(one.cost for one in alone) * (1 + 1e-9)
        assert chosen in step.variants
        assert result.keep_all_cost == pytest.approx(step.base.problem.keep_all_cost)


@pytest.mark.slow
def test_a_budget_that_no_form_meets_is_refused_with_the_smaller_minimum():
    step = captured(channels_last(unet(image=32, depth=1)))
    floors = [working_set_floor(variant.problem) for variant in step.variants]
    net = min(floors) - 1
    nearest, refused = cheapest(step.variants, net, Effort(time_limit=1.0))
    assert isinstance(refused, InfeasibleBudget)
    minimum = refused.minimum_bytes
    assert nearest.net_peak_bytes(refused.schedule) <= minimum
    for variant in step.variants:
        with pytest.raises(InfeasibleBudget) as alone:
            solve(variant.problem, net, time_limit=1.0)
        assert minimum <= alone.value.minimum_bytes * 1.02


@pytest.mark.slow
def test_the_frontier_has_plans_of_both_forms():
    case = channels_last(unet(image=32, width=16, depth=1))
    curve = planner.frontier(case.model, case.inputs, loss_fn=case.loss_fn, points=5,
                             time_limit=1.0)
    assert {plan.spec.low_peak for plan in curve} == {True, False}
    plans = list(curve)
    assert [plan.overhead for plan in plans] == sorted(plan.overhead for plan in plans)
    assert all(plan.overhead_bound <= plan.overhead for plan in plans)


@pytest.mark.slow
def test_a_low_peak_plan_serves_smaller_images():
    sizes, case, step, _, floor = where_the_low_peak_step_takes_less()
    plan = plan_within(step, step.resident_bytes + floor - 1, Effort(time_limit=3.0))
    assert plan.spec.low_peak
    model = plan.apply(case.model)
    other = channels_last(unet(batch=1, image=16, **sizes))
    smaller = Case(case.model, other.args, other.loss_fn)
    assert train(model, smaller).differences(reference(smaller)) == []
    assert measured_peak(model, smaller) <= plan.peak_bytes - step.resident_bytes
