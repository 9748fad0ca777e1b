"""`planner.within` in a loop of accelerate's, before and after `prepare`."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import planner
from tests.support.measured_loops import MeasuredLoop, Trial
from tests.support.models import gpt2

accelerate = pytest.importorskip("accelerate")

case = partial(gpt2, layers=1, width=32, batch=4, vocab=128)


def model() -> torch.nn.Module:
    return case().model


def train(loop: MeasuredLoop, budget: int | None, *, before: bool, precision: str) -> None:
    """Two steps of two micro-steps, clipped."""
    accelerate.state.AcceleratorState._reset_state()  # its settings are those of the process
    accelerator = accelerate.Accelerator(
        mixed_precision=precision, cpu=True, gradient_accumulation_steps=2)
    batch = case().kwargs
    net = loop.model
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if budget is not None and before:
        planner.within(net, budget, time_limit=1)
    net, optimizer = accelerator.prepare(net, optimizer)
    if budget is not None and not before:
        planner.within(net, budget, time_limit=1)

    def run() -> None:
        for _ in range(4):
            loop.begin_step()
            with accelerator.accumulate(net):
                loss = net(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            loop.note_loss(loss)

    loop.run(run)


@pytest.mark.parametrize("before", [pytest.param(True, marks=pytest.mark.slow), False],
                         ids=["before prepare", "after prepare"])
def test_float32(before):
    trial = Trial.of(model, partial(train, before=before, precision="no"))
    trial.check(steps=4)
    trial.check_equal()


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["before prepare", "after prepare"])
def test_bfloat16(before):
    run = partial(train, before=before, precision="bf16")
    trial = Trial.of(model, run, share=0.75)
    trial.check(steps=4)
    trial.check_near(model, run)
