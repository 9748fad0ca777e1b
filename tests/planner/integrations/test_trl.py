"""Budgets in the SFTTrainer of TRL, whose loss is one of its own, made of what the model returns
beside its loss, in tiles that the backward computes again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.measured_loops import MeasuredLoop, MeasuredTraining, Trial
from tests.support.models import gpt2

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from planner.integrations.transformers import MemoryBudgetCallback  # noqa: E402

VOCAB = 256


class Measured(MeasuredTraining, trl.SFTTrainer):
    """Its steps are stages of the measurement."""


def tokenizer() -> Any:
    words = {str(number): number for number in range(VOCAB)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0")),
        eos_token="1", pad_token="2")


def train(loop: MeasuredLoop, budget: int | None, *, folder: Path, **settings: Any) -> None:
    """Three steps of four examples of 20 or 32 tokens."""
    generator = torch.Generator().manual_seed(0)
    examples = [{"input_ids": torch.randint(VOCAB, (32 if number % 3 else 20,),
                                            generator=generator).tolist()} for number in range(12)]
    trainer = Measured(
        loop.model, trl.SFTConfig(
            str(folder), per_device_train_batch_size=4, num_train_epochs=1, max_length=32,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, **{"bf16": False, "activation_checkpointing": False, **settings}),
        train_dataset=datasets.Dataset.from_list(examples), processing_class=tokenizer(),
        callbacks=[] if budget is None else [MemoryBudgetCallback(budget, time_limit=1)])
    trainer.loop = loop
    loop.run(trainer.train)


@pytest.mark.slow
@pytest.mark.filterwarnings(  # Dynamo does so where it traces one
    "ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_a_loss_of_what_is_beside_the_loss(tmp_path, monkeypatch):
    # As narrow as the vocabulary is small.
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)
    trial = Trial.of(lambda: gpt2(layers=1, width=32, vocab=VOCAB).model,
                     partial(train, folder=tmp_path), 0.7)
    trial.check(steps=3)
    trial.check_equal()


def test_its_default_checkpointing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="set activation_checkpointing=False"):
        train(MeasuredLoop(gpt2(layers=1, width=32, vocab=VOCAB).model), 10**9,
              folder=tmp_path, activation_checkpointing=True)
