"""`planner.within` with Inductor: the losses of `torch.compile`, and every step within the budget.

The last batch of the Trainer is smaller.  The oracles: the same loop compiled without a plan, the
same Trainer without a budget, and the allocator's events.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

import planner
from tests.support.compiler import needs_compiler
from tests.support.measured_loops import MeasuredLoop, MeasuredTraining, Trial
from tests.support.models import gpt2

pytestmark = [pytest.mark.slow, needs_compiler]

SEQ, VOCAB = 64, 256


def make() -> nn.Module:
    torch.compiler.reset()
    return gpt2(layers=1, seq=SEQ, width=64, vocab=VOCAB, dropout=0.1).model


def check(trial: Trial, steps: int, distance: float) -> None:
    """Losses agree to their last bit or so, and all steps are within the budget."""
    trial.check(steps)
    assert trial.budgeted.losses == pytest.approx(trial.plain.losses, rel=2e-7)
    assert trial.budgeted.distance_from(trial.plain) <= distance
    plan = planner.plan_of(trial.budgeted.model)
    assert plan is not None and plan.spec.backend == "inductor"


def test_a_plain_loop_draws_the_masks_of_torch_compile_and_computes_its_losses():
    def train(loop: MeasuredLoop, budget: int | None) -> None:
        net = loop.model
        if budget is None:
            net.compile(backend="inductor")
        else:
            planner.within(net, budget, backend="inductor", time_limit=3)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

        def run() -> None:
            for seed, size in enumerate((8, 8, 8)):
                loop.begin_step()
                generator = torch.Generator().manual_seed(seed)
                ids = torch.randint(VOCAB, (size, SEQ), generator=generator)
                loss = net(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loop.note_loss(loss)

        loop.run(run)

    # AdamW makes of a gradient's last bits what it makes of the gradient, where that is about 0.
    check(Trial.of(make, train, share=0.8), steps=3, distance=1e-5)


def test_the_trainer_of_transformers(tmp_path: Path):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    transformers = pytest.importorskip("transformers")
    from planner.integrations.transformers import MemoryBudgetCallback

    class Measured(MeasuredTraining, transformers.Trainer):
        """Its steps are stages of the measurement."""

    def train(loop: MeasuredLoop, budget: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        examples = [{"input_ids": ids, "labels": ids}
                    for ids in torch.randint(VOCAB, (13, SEQ), generator=generator)]
        trainer = Measured(
            loop.model, transformers.TrainingArguments(
                str(tmp_path), num_train_epochs=1, per_device_train_batch_size=8, use_cpu=True,
                save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True),
            train_dataset=examples, callbacks=[] if budget is None else [
                MemoryBudgetCallback(budget, backend="inductor", time_limit=3)])
        trainer.loop = loop
        loop.run(trainer.train)

    # With torch's own random numbers the masks are those of the Trainer that compiles nothing, of
    # whose peak `torch.compile` by itself takes 71%.
    with inductor_config.patch(fallback_random=True):
        check(Trial.of(make, train, share=0.62), steps=2, distance=1e-6)


def test_an_output_that_the_loop_lets_go_is_not_taken_for_held_while_plans_are_judged():
    torch.compiler.reset()
    net = nn.Sequential(nn.Embedding(VOCAB, 64), *(
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)),
        nn.Linear(64, VOCAB))
    planner.within(net, "80%", backend="inductor", time_limit=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for length in (64, 64):  # a warning is an error
        ids = torch.randint(VOCAB, (8, length))
        output = net(ids)
        loss = nn.functional.cross_entropy(output.flatten(0, 1), ids.flatten())
        del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not planner.plan_of(net).spec.holds_output
