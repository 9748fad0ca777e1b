"""The smallest budget: one number whatever was asked, met when asked for, and nothing far below."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import planner
from planner.api import capture
from planner.search.planning import plan_within
from planner.search.variants import Effort
from planner.step.prepared import PreparedStep
from tests.support import models


def _square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _noisy() -> PreparedStep:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.RReLU())]
    return capture(nn.Sequential(*layers), torch.randn(256, 64), loss_fn=_square)


def _dropped() -> PreparedStep:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Dropout(0.1))]
    return capture(nn.Sequential(*layers, nn.Linear(128, 1)), torch.randn(64, 8, 128),
                   loss_fn=_square)


def _case(case: models.Case) -> PreparedStep:
    return capture(case.model, case.inputs, loss_fn=case.loss_fn)


GRID = {
    "rrelu": _noisy,
    "dropout": _dropped,
    "gpt2": lambda: _case(models.gpt2(layers=1)),
    "unet": lambda: _case(models.unet(depth=1, image=32)),
    "resnet": lambda: _case(models.resnet(stages=2, blocks=1, image=32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_one_smallest_budget_whatever_is_asked(name: str) -> None:
    step = GRID[name]()
    refused: dict[int, int] = {}
    met: list[int] = []
    for percent in (1, 40, 50, 70):
        budget = percent * step.baseline_peak_bytes // 100
        try:
            met.append(plan_within(step, budget).peak_bytes)
        except planner.InfeasibleBudget as refusal:
            refused[budget] = refusal.minimum_bytes
            assert refusal.proven_minimum_bytes is not None
            assert refusal.proven_minimum_bytes <= refusal.minimum_bytes
    assert len(set(refused.values())) == 1
    (minimum,) = set(refused.values())
    assert all(budget < minimum for budget in refused)
    assert plan_within(step, minimum).peak_bytes <= minimum
    assert all(peak >= 0.98 * minimum for peak in met)
    with pytest.raises(planner.InfeasibleBudget) as below:
        plan_within(step, int(0.98 * minimum))
    assert below.value.minimum_bytes == minimum


@pytest.mark.slow
def test_a_refusal_speaks_in_percent_where_it_was_asked_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
    inputs = torch.randn(128, 32)
    with pytest.raises(planner.InfeasibleBudget, match=r"^5% is .* of .*B; \d+% would do") as told:
        planner.plan(model, inputs, budget="5%", loss_fn=_square)
    refusal = told.value
    would_do = str(refusal).split("; ")[1].split("%")[0]
    plan = planner.plan(model, inputs, budget=f"{would_do}%", loss_fn=_square)
    assert plan.peak_bytes <= refusal.minimum_bytes
    assert pickle.loads(pickle.dumps(refusal)).proven_minimum_bytes == (
        refusal.proven_minimum_bytes)
    with pytest.raises(planner.InfeasibleBudget, match=r"^the training step") as in_bytes:
        planner.plan(model, inputs, budget=refusal.minimum_bytes // 2, loss_fn=_square)
    assert in_bytes.value.minimum_bytes == refusal.minimum_bytes


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_refused_in_percent_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
    inputs = torch.randn(64, 32)
    with pytest.raises(planner.InfeasibleBudget, match=r"5% is .* of .*B; \d+% would do"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        planner.within(model, budget="5%", optimizer=optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            _square(model(inputs)).backward()
            optimizer.step()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's handler, which a shell takes away from what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_takes_the_best_plan_so_far() -> None:
    step = _case(models.gpt2())
    budget = 60 * step.baseline_peak_bytes // 100

    def interrupt(message: str) -> None:
        if "extra time" in message:
            signal.raise_signal(signal.SIGINT)

    plan = plan_within(step, budget, Effort(progress=interrupt))
    assert plan.peak_bytes <= budget and plan.status == "feasible"
    assert any("interrupted" in note for note in plan.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_before_anything_fits_ends_planning() -> None:
    step = _case(models.gpt2(layers=1))

    def interrupt(message: str) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        plan_within(step, step.resident_bytes + step.base.floor_bytes, Effort(progress=interrupt))
