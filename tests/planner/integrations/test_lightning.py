"""Budgets in Lightning's Trainer and Fabric."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import planner
from tests.support.measured_loops import MeasuredLoop, Trial
from tests.support.models import LanguageModel

lightning = pytest.importorskip("lightning")

from planner.integrations.lightning import MemoryBudget  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]


class Lit(lightning.LightningModule):
    """A language model; `training_step` calls `self.net`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = LanguageModel(2, 32, 128, dropout=0.1)
        self.loop: MeasuredLoop | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids).log_softmax(-1)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        (ids,) = batch
        if self.loop is not None:
            self.loop.begin_step()
        loss = F.cross_entropy(self.net(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        self.log("loss", loss)
        if self.loop is not None:
            self.loop.note_loss(loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("score", self(batch[0]).mean())

    def on_train_batch_end(self, *args: Any) -> None:
        if self.loop is not None:
            self.loop.end_step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Direct(Lit):
    """`training_step` calls the LightningModule, which has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids) * self.scale

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].roll(-1, 1).flatten())


class Aside(Direct):
    """`training_step` calls none of them."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return self.net.blocks[0](self.net.embedding(batch[0])).square().mean()


def loader(count: int = 22) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randint(128, (count, 32), generator=generator)),
                      batch_size=4)


def trainer(callbacks: list[Any], **settings: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **settings)


def train(loop: MeasuredLoop, budget: int | None, precision: str = "32-true") -> None:
    """An epoch of 6 micro-batches, the last one smaller, clipped, with validation in between."""
    loop.model.loop = loop
    callbacks = [] if budget is None else [MemoryBudget(budget, time_limit=1)]
    fit = trainer(callbacks, precision=precision, accumulate_grad_batches=2,
                  gradient_clip_val=0.5, val_check_interval=2).fit
    loop.run(partial(fit, loop.model, loader(), loader(8)))


@pytest.mark.slow
def test_accumulation_clipping_and_validation(caplog):
    with caplog.at_level(logging.INFO, "planner"):
        trial = Trial.of(Lit, train)
    trial.check(steps=6)
    trial.check_equal()
    assert "LanguageModel: 6 of 6 steps ran under a plan" in caplog.messages[-1]


@pytest.mark.slow
def test_mixed_precision():
    run = partial(train, precision="bf16-mixed")
    trial = Trial.of(Lit, run, 0.8)  # products of bf16 matrices take workspace on some CPUs
    trial.check(steps=6)
    captured = MeasuredLoop(Lit())
    captured.model.net.compile(backend="aot_eager")
    run(captured, None)
    assert trial.budgeted.distance_from(trial.plain) <= 2 * captured.distance_from(trial.plain)


@pytest.mark.slow
def test_fabric(caplog):
    def train_with_fabric(loop: MeasuredLoop, budget: int | None) -> None:
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3)
        loop.model, optimizer = fabric.setup(loop.model, optimizer)
        net = loop.model
        if budget is not None:
            planner.within(net, budget, time_limit=1)
        data = loader(12)  # counted were it made while memory is measured

        def run() -> None:
            for (ids,) in data:
                loop.begin_step()
                loss = F.cross_entropy(net(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                loop.note_loss(loss)

        loop.run(run)

    with caplog.at_level(logging.INFO, "planner"):
        trial = Trial.of(lambda: Lit().net, train_with_fabric)
    trial.check(steps=3)
    trial.check_equal()
    assert any(said.startswith("LanguageModel (ids int64[4, 32])") for said in caplog.messages)


@pytest.mark.slow
def test_what_is_planned_is_what_the_training_step_calls():
    direct = Direct()
    trainer([MemoryBudget(10**9, time_limit=1)]).fit(direct, loader(8))
    assert planner.steps_of(direct).planned == 2


def test_a_module_that_is_not_called_is_refused():
    with pytest.raises(ValueError, match=r"Aside did not call the LightningModule"):
        trainer([MemoryBudget(10**9, time_limit=1)]).fit(Aside(), loader(8))
    with pytest.raises(ValueError, match=r"module='nett': Lit has none .* it has net"):
        trainer([MemoryBudget(10**9, module="nett")]).fit(Lit(), loader(8))


def test_checkpointing_beside_the_budget_is_refused():
    module = Lit()
    module.net.gradient_checkpointing = True
    with pytest.raises(ValueError, match="LanguageModel checkpoints its activations already"):
        trainer([MemoryBudget(10**9)]).fit(module, loader(8))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "planner.integrations.lightning")
    with pytest.raises(ImportError, match="pip install lightning"):
        import planner.integrations.lightning  # noqa: F401
