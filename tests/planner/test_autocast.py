"""Plans for steps under autocast: captured, held and verified so, and refused otherwise."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import planner
from tests.support.models import BUILDERS, Case

SIZES = {name: {"layers": 1} for name in ("gpt2", "llama", "language_model")}
SIZES["unet"] = {"depth": 1, "image": 32}


def planned(case: Case, **options):
    return planner.plan(case.model, case.inputs, loss_fn=case.loss_fn, time_limit=1, **options)


def verified(case: Case, plan: planner.Plan) -> planner.Verification:
    return planner.verify(case.model, plan, case.inputs, loss_fn=case.loss_fn)


@pytest.mark.parametrize(("name", "autocast"), [
    ("language_model", "fp16"), *(pytest.param(*row, marks=pytest.mark.slow)
                                  for row in (("llama", torch.bfloat16), ("unet", "bf16")))])
def test_the_step_is_planned_and_verified_under_autocast(name, autocast):
    case = BUILDERS[name](**SIZES.get(name, {}))
    free = planned(case, autocast=autocast)
    plan = planned(case, autocast=autocast, budget=int(0.97 * free.peak_bytes))
    assert plan.recompute_flops or any(row.recomputations for row in plan.decisions)
    found = verified(case, plan)
    assert found.ok, str(found)
    assert found.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.02 if name == "unet" else 0)
    # The planned step rounds as the plain one does.
    assert found.max_gradient_error == found.loss_error == 0


@pytest.mark.slow
def test_autocast_around_the_call_gives_the_same_plan():
    case = BUILDERS["gpt2"](layers=1)
    plan = planned(case, autocast="bf16", budget="90%")
    assert plan.spec.signature.autocast == "cpu bfloat16"
    with torch.autocast("cpu", torch.bfloat16):
        assert planned(case, budget="90%") == plan
    assert planner.memory(case.model, case.inputs, autocast="bf16", plan=plan,
                          hold_output="backward").peak_bytes == plan.peak_bytes


def test_a_step_without_it_is_refused_in_words():
    case = BUILDERS["language_model"](layers=1)
    applied = planned(case, autocast="bf16").apply(case.model)
    with pytest.raises(planner.PlanMismatch, match=r"made under autocast \(cpu bfloat16\), this "
                       "step runs without autocast"):
        applied(*case.args)
    with torch.autocast("cpu", torch.bfloat16):
        case.loss_fn(applied(*case.args)).backward()
    assert planner.steps_of(applied).planned == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["autocast", "parameters"])
def test_a_wrong_gradient_is_seen_below_the_rounding_of_the_dtype(monkeypatch, dtype):
    case = BUILDERS["llama"](layers=1)
    if dtype == "parameters":
        case = case._replace(model=case.model.bfloat16())
    plan = planned(case, autocast="bf16" if dtype == "autocast" else None)
    assert verified(case, plan).ok
    from planner.running import verify as module

    class Almost(nn.Module):
        def __init__(self, *arguments):
            super().__init__()
            self.inner = planner.apply(*arguments)

        def forward(self, *args, **kwargs):
            output = self.inner(*args, **kwargs)
            output.loss.register_hook(lambda gradient: 0.999 * gradient)
            return output

    monkeypatch.setattr(module, "apply", Almost)
    found = verified(case, plan)
    assert not found.ok and found.max_gradient_error > found.tolerance, str(found)
    assert "NOT OK" in str(found)


@pytest.mark.slow
def test_rounding_of_inductors_kernels_is_what_the_tolerance_allows():
    case = BUILDERS["language_model"](layers=1)
    plan = planned(case, autocast="bf16", backend="inductor", budget="95%")
    found = verified(case, plan)
    assert found.ok and found.tolerance < 0.01, str(found)
    assert not dataclasses.replace(found, max_gradient_error=2.1 * found.tolerance).ok


def test_another_dtype_is_told():
    case = BUILDERS["language_model"](layers=1)
    with pytest.raises(ValueError, match=r"autocast must be 'bf16' or 'fp16'.*got 'int8'"):
        planned(case, autocast="int8")
    with pytest.raises(TypeError, match="unexpected keyword argument 'autocast'"):
        planner.within(case.model, autocast="bf16")


class NormalizedOverTime(nn.Module):
    """Batch normalization over a transposed view, whose strides it does not keep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(torch.relu(hidden)).float().square().mean()


def test_batch_normalization_of_a_transposed_view_is_followed_by_the_plain_kernels():
    plain, x = NormalizedOverTime(), torch.randn(8, 50, 32)
    model = planner.within(copy.deepcopy(plain), "95%", time_limit=1)
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x)
        loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


class UsesWeightsAgain(nn.Module):
    """Uses weights several times: cast by autocast, cast by its own code, and as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.linear, self.cell = nn.Linear(32, 32), nn.GRUCell(32, 32)
        self.convolution = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.norm(torch.tanh(self.linear(x)))
            x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2).tanh()
        state = x[:, 0]
        for moment in range(4):
            state = self.cell(x[:, moment], state)
        x = x + state[:, None] + torch.tanh(x @ self.linear.weight.to(torch.bfloat16))
        x = x + torch.tanh(x @ self.linear.weight.bfloat16())
        logits = (x @ self.embedding.weight.t()) * (self.embedding.weight @ x[0, 0]).mean()
        return logits.float().logsumexp(-1).mean() + 0.01 * self.linear.weight.square().sum()


def test_gradients_of_a_weight_that_is_used_again_are_added_as_the_plain_step_adds_them():
    plain = UsesWeightsAgain()
    model = planner.within(copy.deepcopy(plain), "75%", time_limit=1)
    for length in (40, 24, 33):  # the second is captured with symbolic sizes
        tokens = torch.randint(0, 64, (8, length))
        for each in (plain, model):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(tokens)
            loss.backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
