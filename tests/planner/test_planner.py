"""From a model to a plan to a real step, through the public names only."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import planner


def make_model(width=64, *, dropout=0.1):
    torch.manual_seed(0)
    layers = []
    for _ in range(4):
        layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout),
                   nn.Linear(4 * width, width), nn.BatchNorm1d(width)]
    return nn.Sequential(*layers)


def mean_square(output):
    return output.square().mean()


def batch():
    return torch.randn(512, 64, generator=torch.Generator().manual_seed(1))


def plan_model(model, **options):
    return planner.plan(model, batch(), loss_fn=mean_square, time_limit=10.0, **options)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def keep_all(model):
    return plan_model(model)


@pytest.fixture(scope="module")
def tight(model):
    return plan_model(model, budget="80%")


def state_of(model):
    return ({name: tensor.clone() for name, tensor in model.state_dict().items()},
            torch.get_rng_state(), [p.grad for p in model.parameters()], model.training)


def assert_same_state(before, after):
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert torch.equal(before[1], after[1])
    assert all(a is b for a, b in zip(before[2], after[2], strict=True))
    assert before[3] == after[3]


def test_a_plan_is_measured_to_hold(model, keep_all, tight):
    assert keep_all.overhead == 0 and keep_all.budget_bytes is None
    assert tight.peak_bytes <= tight.budget_bytes < keep_all.peak_bytes
    assert 0 < tight.overhead_bound <= tight.overhead
    for plan in (keep_all, tight):
        verification = planner.verify(model, plan, batch(), loss_fn=mean_square)
        assert verification.ok, str(verification)
        assert verification.predicted_peak_bytes == plan.peak_bytes
        assert verification.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)
        assert "ok" in str(verification) and verification.to_dict()["ok"]


def test_neither_planning_nor_verifying_changes_the_model(tight):
    model = make_model()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = state_of(model)
    plan_model(model, budget="80%")
    assert_same_state(before, state_of(model))
    planner.verify(model, tight, batch(), loss_fn=mean_square)
    assert_same_state(before, state_of(model))


def test_a_plan_made_on_meta_serves_a_real_model(tight):
    plan = planner.plan(make_model().to("meta"), torch.empty(512, 64, device="meta"),
                        loss_fn=mean_square, budget=tight.budget_bytes, time_limit=10.0)
    assert plan.spec.regions[0].forward == tight.spec.regions[0].forward
    assert planner.verify(make_model(), plan, batch(), loss_fn=mean_square).ok


@pytest.mark.slow
def test_a_plan_serves_another_process(tight, tmp_path):
    path = tmp_path / "plan.json"
    tight.save(path)
    code = f"""
import planner
from tests.planner.test_planner import batch, make_model, mean_square
verification = planner.verify(make_model(), planner.load({str(path)!r}), batch(),
                              loss_fn=mean_square)
assert verification.ok, str(verification)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_equal_arguments_give_equal_files(model, tight, tmp_path):
    plan_model(make_model(), budget="80%").save(tmp_path / "again.json")
    tight.save(tmp_path / "plan.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_another_model_is_refused_by_its_first_difference(tight):
    with pytest.raises(planner.PlanMismatch, match=r"0\.weight"):
        tight.apply(make_model(width=32))
    stranger = make_model()
    stranger[1] = nn.ReLU()
    applied = planner.apply(stranger, tight)
    with pytest.raises(planner.PlanMismatch, match="gelu"):
        applied(batch())


def test_another_shape_is_refused(tight):
    with pytest.raises(planner.PlanMismatch, match="512"):
        tight.apply(make_model())(torch.cat([batch(), batch()]))


@pytest.mark.slow
def test_an_impossible_budget_names_one_that_works():
    model = make_model()[:10]
    with pytest.raises(planner.InfeasibleBudget) as caught:
        plan_model(model, budget="1MB")
    plan = plan_model(model, budget=caught.value.minimum_bytes)
    assert plan.peak_bytes <= caught.value.minimum_bytes
    assert "aten" in caught.value.bottleneck


def test_what_is_kept_on_request_is_not_recomputed(model):
    plan = plan_model(model, budget="85%", keep=("1", "6", "11"))
    kept = {row.module: row.action for row in plan.decisions}
    assert kept["1"] == kept["6"] == kept["11"] == "keep"
    with pytest.raises(ValueError, match="nowhere"):
        plan_model(model, keep=("nowhere",))


def test_an_optimizer_counts_with_its_state(model, keep_all):
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    plan = plan_model(model, optimizer="adamw")
    assert plan.memory["optimizer"] == pytest.approx(2 * parameters, rel=0.01)
    assert plan.resident_bytes == keep_all.resident_bytes + plan.memory["optimizer"]
    with pytest.raises(ValueError, match="no_such_optimizer"):
        plan_model(model, optimizer="no_such_optimizer")


@pytest.mark.slow
def test_the_frontier_of_a_model(model, keep_all):
    curve = planner.frontier(model, batch(), points=4, loss_fn=mean_square, time_limit=4.0)
    assert next(iter(curve)).peak_bytes == keep_all.peak_bytes
    assert len(curve) >= 2


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"solver": "magic"}, ValueError, "known: .*auto"),
    ({"backend": "jax"}, ValueError, "known: eager, inductor"),
    ({"cost_model": "measurement"}, ValueError, "unknown cost_model"),
    ({"time_limit": 0}, ValueError, "time_limit"),
    ({"time_limit": float("nan")}, ValueError, "time_limit"),
    ({"time_limit": "60"}, TypeError, "time_limit"),
    ({"budget": "lots"}, ValueError, "lots"),
    ({"budget": 1, "budget_gb": 1}, ValueError, "not both"),
    ({"loss_fn": 3}, TypeError, "loss_fn"),
    ({"keep": "layers"}, TypeError, "keep"),
])
def test_wrong_arguments_are_told(model, options, error, message):
    with pytest.raises(error, match=message):
        planner.plan(model, batch(), **options)


@pytest.mark.parametrize(("inputs", "error", "message"), [
    ([torch.ones(2, 64)], TypeError, "make the list a tuple"),
    ("text", TypeError, "inputs must be"),
    ({0: torch.ones(2, 64)}, TypeError, "text as keys"),
    (None, ValueError, "neither example_input_array nor dummy_inputs"),
])
def test_inputs_in_other_forms_are_told(model, inputs, error, message):
    with pytest.raises(error, match=message):
        planner.plan(model, inputs)


def test_no_model_is_told(tight):
    with pytest.raises(TypeError, match=r"Linear \(a class\)"):
        planner.plan(nn.Linear, batch())
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        planner.apply(3, tight)
    with pytest.raises(TypeError, match=r"planner\.load"):
        planner.apply(nn.Linear(1, 1), "plan.json")


def test_a_model_that_does_not_run_is_a_capture_error(model):
    with pytest.raises(planner.CaptureError):
        planner.plan(model, torch.ones(2, 63), loss_fn=mean_square)
    frozen = make_model().requires_grad_(False)
    with pytest.raises(planner.CaptureError, match="gradient"):
        planner.plan(frozen, batch(), loss_fn=mean_square)


def test_inputs_of_the_model_itself():
    class WithExample(nn.Linear):
        example_input_array = torch.ones(5, 3)

    plan = planner.plan(WithExample(3, 2), loss_fn=mean_square)
    assert plan.inputs == {"args": [{"shape": [5, 3], "dtype": "float32"}], "kwargs": {}}


def test_verify_needs_values_and_the_mode_of_the_plan(tight):
    with pytest.raises(ValueError, match="on meta"):
        planner.verify(make_model().to("meta"), tight, batch(), loss_fn=mean_square)
    with pytest.raises(planner.PlanMismatch, match=r"model\.train\(\)"):
        planner.verify(make_model().eval(), tight, batch(), loss_fn=mean_square)


def test_progress_is_reported_to_who_asks(model, capsys):
    lines = []
    plan_model(model, progress=lines.append)
    assert lines and all(isinstance(line, str) for line in lines)
    plan_model(model)
    assert capsys.readouterr() == ("", "")
