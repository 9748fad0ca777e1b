"""Steps in which dice or values decide which blocks run."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

import planner
from tests.support.stages import record_stages

NONE_SKIPPED = 15
"""A seed with which torch's dice skip no block."""


def thrown(dice: str) -> float | torch.Tensor:
    if dice == "python":
        return random.random()
    if dice == "item":
        return torch.rand([]).item()
    return float(numpy.random.random()) if dice == "numpy" else torch.rand([])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(nn.functional.gelu(self.wide(self.norm(x))))


class Dropping(nn.Module):
    """Skips blocks, or stops after some of them, as dice fall."""

    def __init__(self, dice: str, *, stops: bool = False) -> None:
        super().__init__()
        self.dice, self.stops = dice, stops
        # Without a layer in front, no graph is of steps that skip and of those that do not.
        self.first = nn.Identity() if dice == "item" else nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.ran: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, ran = self.first(x), 0
        for number, block in enumerate(self.blocks):
            skips = bool(thrown(self.dice) < 0.4)
            if skips and self.stops and number:
                break
            if not skips:
                x, ran = block(x), ran + 1
        self.ran.append(ran)
        return x


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def train(model: nn.Module, steps: int, first: int = 0) -> tuple[list[float], list[int]]:
    """Losses and peaks of steps with these seeds, from `first` on."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses, peaks = [], []
    for number in range(first, first + steps):
        seed(number)

        def step() -> None:
            loss = model(torch.randn(256, 32)).square().mean()
            loss.backward()
            losses.append(loss.item())

        peaks.append(record_stages([step])[0].peak_bytes)
        optimizer.step()
        optimizer.zero_grad()
    return losses, peaks


@pytest.mark.parametrize(("dice", "stops", "first"), [
    ("python", False, 0), ("numpy", True, 0), ("torch", False, 0), ("item", False, NONE_SKIPPED)])
@pytest.mark.slow
def test_every_step_is_within_one_plan(dice: str, stops: bool, first: int) -> None:
    torch.manual_seed(0)
    plain = Dropping(dice, stops=stops)
    torch.manual_seed(0)
    model = Dropping(dice, stops=stops)
    limit = 1_600_000
    planner.within(model, limit)
    losses, peaks = train(model, 8, first)
    expected, plain_peaks = train(plain, 8, first)
    assert losses == expected
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    plan = planner.plan_of(model)
    assert plan is not None
    other_bytes = plan.resident_bytes - 256 * 32 * 4  # but for the batch, which the step makes
    assert max(plain_peaks) + other_bytes > limit
    assert max(peaks) + other_bytes <= limit
    status = planner.status(model)
    assert status.planned_steps == status.steps == 8
    assert status.plans <= 3  # for the first step, with what it showed, and for no subset


@pytest.mark.parametrize("dice", ["python", "numpy"])
def test_planning_throws_no_dice(dice: str) -> None:
    model = Dropping(dice)
    seed(0)
    expected = random.random(), numpy.random.random(), torch.rand(1).item()
    seed(0)
    planner.plan(model, torch.randn(8, 32), loss_fn=lambda out: out.sum(), regions="blocks")
    seed_after = random.random(), numpy.random.random()
    assert seed_after == expected[:2]


@pytest.mark.compat
def test_dice_of_python_may_decide_which_blocks_run() -> None:
    model = planner.within(Dropping("python"), "90%", time_limit=1)
    seed(0)
    model(torch.randn(256, 32)).square().mean().backward()
    assert planner.status(model).planned_steps == 1


def test_a_plan_serves_what_skips_other_blocks() -> None:
    """Ahead of time no block is left out, whatever the dice."""
    seed(3)
    plan = planner.plan(Dropping("python"), torch.randn(8, 32), loss_fn=lambda out: out.sum(),
                        regions="blocks")
    assert set(plan.spec.blocks) == {f"blocks.{number}" for number in range(5)}


class Scaling(nn.Module):
    """Scales what blocks add, as values decide: any call may take another path around them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            x = y if torch.rand([]) < 0.5 else y * 0.5
        return x


@pytest.mark.slow
def test_many_paths_around_blocks_share_one_plan() -> None:
    torch.manual_seed(0)
    plain = Scaling()
    torch.manual_seed(0)
    model = Scaling()
    planner.within(model, "75%")
    expected, plain_peaks = train(plain, 12)
    losses, peaks = train(model, 12)
    assert losses == expected
    assert planner.status(model).plans <= 8  # of 32 paths
    parameter_bytes = sum(each.nbytes for each in model.parameters())
    assert max(peaks[8:]) + parameter_bytes <= 0.75 * (max(plain_peaks) + parameter_bytes)


class Recurring(nn.Module):
    """Runs its blocks over and over, as often as dice say."""

    def __init__(self, dice: str) -> None:
        super().__init__()
        self.dice = dice
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(1 + int(6 * thrown(self.dice))):
            for block in self.blocks:
                x = block(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("dice", ["python", "item"])
def test_blocks_may_run_any_number_of_times(dice: str) -> None:
    torch.manual_seed(0)
    plain = Recurring(dice)
    torch.manual_seed(0)
    model = Recurring(dice)
    parameter_bytes = sum(each.nbytes for each in model.parameters())
    expected, plain_peaks = train(plain, 16)
    limit = int(0.6 * (max(plain_peaks[1:]) + parameter_bytes))
    planner.within(model, limit)
    losses, peaks = train(model, 16)
    assert losses == expected
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    over = [peak for peak in peaks if peak + parameter_bytes > limit]
    assert len(over) <= 1  # where blocks run more often than ever before
    status = planner.status(model)
    assert status.planned_steps == status.steps == 16
    assert status.plans <= 9
    assert max(peaks[8:]) + parameter_bytes <= limit < max(plain_peaks[8:]) + parameter_bytes


class Attending(nn.Module):
    """A block whose attention makes views, of several sizes, of what it projects."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (each(x).view(*x.shape[:-1], 4, 8).transpose(1, 2)
                             for each in (self.query, self.key, self.value))
        weights = (query * 0.3) @ (key.transpose(2, 3) * 0.3)
        return x + (weights.softmax(-1) @ value).transpose(1, 2).reshape(x.shape)


class Convolving(nn.Module):
    """A block whose results have a quotient of a size as size."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(32, 32, 4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.convolution(x))


class Hearing(nn.Module):
    """Skips blocks as dice fall, and is called with sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Convolving() for _ in range(2))
        self.blocks = nn.ModuleList(Attending() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution in self.convolutions:
            x = convolution(x)
        x = x.transpose(1, 2).contiguous()
        for block in self.blocks:
            if random.random() > 0.2:
                x = block(x)
        return x


@pytest.mark.slow
def test_blocks_of_other_lengths_are_not_compiled_again() -> None:
    model = planner.within(Hearing(), "80%", time_limit=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(length: int) -> None:
        model(torch.randn(4, 32, length)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    seed(0)
    for length in (400, 400, 320, 280, 360):
        step(length)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (308, 344, 252, 396):
            step(length)
    assert planner.status(model).planned_steps == 9
