"""Budgets in the Trainer of transformers: the same losses, and every step within the budget."""

from __future__ import annotations

import copy
import gc
import logging
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from tests.support.measured_loops import MeasuredLoop, MeasuredTraining, Trial
from tests.support.models import gpt2

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
transformers = pytest.importorskip("transformers")

from planner.integrations.transformers import MemoryBudgetCallback  # noqa: E402

make = partial(gpt2, layers=1, width=32, vocab=128, dropout=0.1)


def dataset(count: int) -> list[dict[str, torch.Tensor]]:
    """Examples of 24 or 32 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = [24 if number % 7 else 32 for number in range(count)]
    return [{"input_ids": torch.randint(128, (length,), generator=generator)}
            for length in lengths]


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded to the longest."""
    ids = [example["input_ids"] for example in examples]
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return {"input_ids": pad(ids), "labels": pad(ids, padding_value=-100),
            "attention_mask": pad([torch.ones_like(each) for each in ids])}


class Measured(MeasuredTraining, transformers.Trainer):
    """Its steps are stages of the measurement."""


class EndOfStep(transformers.TrainerCallback):
    """What comes after the optimizer's step is no part of it: logs, evaluation, checkpoints."""

    def __init__(self, loop: MeasuredLoop) -> None:
        self.loop = loop

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.loop.end_step()

    on_step_end = on_substep_end


def train(loop: MeasuredLoop, budget: int | None, *, folder: Path, resume: bool = False,
          **settings: Any) -> None:
    """An epoch of 22 examples in batches of 4, in 6 micro-batches and 3 steps of the optimizer."""
    settings = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "save_strategy": "no",
                "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "steps",
                "eval_steps": 1, "logging_strategy": "no", "report_to": [], "disable_tqdm": True,
                "use_cpu": True, **settings}
    trainer = Measured(
        loop.model, transformers.TrainingArguments(str(folder), **settings),
        train_dataset=dataset(22), eval_dataset=dataset(9), data_collator=collate,
        callbacks=[EndOfStep(loop), *(
            [] if budget is None else [MemoryBudgetCallback(budget, time_limit=1)])])
    trainer.loop = loop
    loop.run(partial(trainer.train, resume_from_checkpoint=resume or None))


def model() -> nn.Module:
    return make().model


@pytest.mark.slow
def test_dropout_accumulation_clipping_evaluation_and_uneven_batches(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "planner"):
        trial = Trial.of(model, partial(train, folder=tmp_path))
    trial.check(steps=6)
    trial.check_equal()
    said = [record.getMessage() for record in caplog.records if record.name == "planner"]
    # A plan, one each with what three backwards showed, which serve the short batch, and the end.
    assert len(said) == 5
    assert said[-1].startswith("GPT2LMHeadModel: 6 of 6 steps ran under a plan; planned for eager")


@pytest.mark.slow
def test_label_smoothing_is_a_loss_outside_of_the_model(tmp_path):
    trial = Trial.of(model, partial(train, folder=tmp_path, label_smoothing_factor=0.1))
    trial.check(steps=6)
    trial.check_equal()


@pytest.mark.slow
def test_save_and_resume(tmp_path):
    first = MeasuredLoop(model())
    train(first, 10**9, folder=tmp_path, save_strategy="steps", save_steps=1, max_steps=2)
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-2")
    for name, value in first.model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value)
    trial = Trial.of(model, partial(train, folder=tmp_path, resume=True))
    trial.check(steps=2)
    trial.check_equal()


def test_a_training_that_is_over_keeps_no_optimizer():
    net, budget = nn.Linear(8, 8), MemoryBudgetCallback("100%")
    optimizer = torch.optim.AdamW(net.parameters())
    budget._begin(net, optimizer, 1, 1, "")
    for _ in range(2):
        net(torch.ones(64, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    budget._end(net)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


def test_checkpointing_beside_the_budget_is_refused(tmp_path):
    with pytest.raises(ValueError, match="set activation_checkpointing=False"):
        train(MeasuredLoop(model()), 10**9, folder=tmp_path, activation_checkpointing=True)


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"budget": "8 apples"}, ValueError, "unknown unit"),
    ({"budget": 1, "budget_gb": 1}, ValueError, "not both"),
    ({"wat": 3}, TypeError, "wat"),
])
def test_arguments_are_checked_at_once(arguments, error, words):
    with pytest.raises(error, match=words):
        MemoryBudgetCallback(**arguments)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "planner.integrations.transformers")
    with pytest.raises(ImportError, match="pip install transformers accelerate"):
        import planner.integrations.transformers  # noqa: F401


@pytest.mark.slow
def test_images_in_texts_of_other_lengths():
    # Its code checks that there are as many tokens for images as the images take; the last tokens
    # go on where larger sizes are captured.
    text = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=100, bos_token_id=1, eos_token_id=2)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        image_size=32, patch_size=8, projection_dim=32)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=99, image_seq_length=16,
        vision_feature_layer=-1)
    torch.manual_seed(0)
    plain = transformers.LlavaForConditionalGeneration(config)
    model = planner.within(copy.deepcopy(plain), "80%", time_limit=1)
    for length in (24, 30, 18, 28):
        ids = torch.randint(3, 90, (4, length + 16))
        ids[:, -16:] = 99
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids,
                 "pixel_values": torch.randn(4, 3, 32, 32)}
        losses = []
        for each in (plain, model):
            each.zero_grad()
            losses.append(each(**batch).loss)
            losses[-1].backward()
        assert losses[0] == losses[1]
    assert planner.status(model).planned_steps == 4
