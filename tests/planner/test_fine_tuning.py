"""Fine-tuning with quantized weights, small optimizers and steps in the backward: by a budget, by
an applied plan, and in the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import planner
from tests.support.measured_loops import MeasuredLoop, MeasuredTraining
from tests.support.models import llama
from tests.support.quantized import four_bit, int8

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from planner.integrations.transformers import MemoryBudgetCallback  # noqa: E402

pytestmark = [pytest.mark.slow,
              pytest.mark.filterwarnings("default")]  # which the libraries of quantization raise

BATCH, LENGTH, STEPS = 4, 64, 4


def base() -> nn.Module:
    return llama(layers=1, width=64, seq=LENGTH).model


def with_adapters(quantize: Callable[[nn.Linear], nn.Module] | None) -> nn.Module:
    model = base()
    if quantize is None:
        model.to(torch.bfloat16)
    else:
        for name, module in [*model.model.layers.named_modules()]:
            if isinstance(module, nn.Linear):
                model.model.layers.set_submodule(name, quantize(module))
    return peft.get_peft_model(model, peft.LoraConfig(
        r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "up_proj"]))


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def eight_bit(parameters: Any) -> Optimizer:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    optimizer: Optimizer = bitsandbytes.optim.AdamW8bit(parameters, 1e-3, min_8bit_size=512)
    return optimizer


def eight_bit_of_torchao(parameters: Any) -> Optimizer:
    optimizer: Optimizer = pytest.importorskip("torchao.optim").AdamW8bit(parameters, 1e-3)
    return optimizer


class Idle(Optimizer):
    """The Trainer's optimizer where hooks of the parameters make the steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        pass


def stepping_in_backward() -> nn.Module:
    model = base()
    for parameter in model.parameters():
        optimizer = adamw([parameter])

        def use(parameter: torch.Tensor, optimizer: Optimizer = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(use)
    return model


class Row(NamedTuple):
    make: Callable[[], nn.Module]
    optimizer: Callable[[Any], Optimizer] = adamw
    name: str = ""
    """Of the Trainer's optimizer, if the Trainer makes it."""


ROWS = {
    "LoRA in 16 bit": Row(lambda: with_adapters(None), name="adamw_torch"),
    "bitsandbytes NF4": Row(lambda: with_adapters(four_bit), name="adamw_torch"),
    "torchao int8": Row(lambda: with_adapters(int8)),
    "bitsandbytes AdamW8bit": Row(base, eight_bit, "adamw_bnb_8bit"),
    "torchao AdamW8bit": Row(base, eight_bit_of_torchao),
    "torchao AdamW4bit": Row(base, name="adamw_torch_4bit"),
    "in the backward": Row(stepping_in_backward, Idle)}


def ids(seed: int) -> torch.Tensor:
    return torch.randint(256, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def batch(seed: int) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(seed), "labels": ids(seed)}


def scales(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of the states that bitsandbytes' weights have."""
    states = [getattr(parameter, "quant_state", None) for parameter in model.parameters()]
    while states:
        state = states.pop()
        for value in () if state is None else vars(state).values():
            if isinstance(value, torch.Tensor):
                yield value
            elif type(value) is type(state):
                states.append(value)


def trained(parameters: Iterator[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def loop_of(model: nn.Module) -> MeasuredLoop:
    return MeasuredLoop(model, own=[*scales(model)])


def train(loop: MeasuredLoop, row: Row, called: nn.Module | None = None) -> None:
    model = called or loop.model

    def run() -> None:
        optimizer = row.optimizer(trained(loop.model.parameters()))
        for step in range(STEPS):
            loop.begin_step()
            inputs = batch(step)
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.note_loss(loss)
            del loss, inputs

    loop.run(run)


class Measured(MeasuredTraining, transformers.Trainer):
    """Its steps are stages of the measurement."""


def train_by_trainer(loop: MeasuredLoop, row: Row, folder: Path, budget: int | None) -> None:
    trainer = Measured(
        loop.model, transformers.TrainingArguments(
            str(folder), num_train_epochs=1, per_device_train_batch_size=BATCH,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, max_grad_norm=0, **({"optim": row.name} if row.name else {})),
        train_dataset=[{"input_ids": each} for each in torch.cat([*map(ids, range(STEPS))])],
        data_collator=lambda rows: dict.fromkeys(
            ("input_ids", "labels"), torch.stack([each["input_ids"] for each in rows])),
        callbacks=[] if budget is None else [MemoryBudgetCallback(budget, time_limit=2)],
        optimizers=(None if row.name else row.optimizer(trained(loop.model.parameters())), None))
    trainer.loop = loop
    loop.run(trainer.train)


TABLES = 2 * 256 * 4
"""Bytes of the tables that bitsandbytes makes once, for all models, which no loop's peak has."""


def check(plain: MeasuredLoop, loop: MeasuredLoop, plan: planner.Plan) -> None:
    """The same losses; steady steps have the predicted peak, but for scalars of an optimizer."""
    assert loop.losses == plain.losses
    assert plan.budget_bytes is not None and max(loop.peaks) <= plan.budget_bytes
    assert -64 < plan.peak_bytes - max(loop.peaks[1:]) < 64 + TABLES
    assert -64 < plan.baseline_peak_bytes - max(plain.peaks[1:]) < 64 + TABLES


@pytest.mark.parametrize("name", ROWS)
def test_within(name: str) -> None:
    row = ROWS[name]
    plain, loop = loop_of(row.make()), loop_of(row.make())
    train(plain, row)
    planner.within(loop.model, int(0.75 * max(plain.peaks)), time_limit=2)
    train(loop, row)
    plan, status = planner.plan_of(loop.model), planner.status(loop.model)
    assert plan is not None and status is not None and status.planned_steps == STEPS
    check(plain, loop, plan)


@pytest.mark.parametrize("name", ROWS)
def test_an_applied_plan(name: str) -> None:
    row = ROWS[name]
    plain, loop = loop_of(row.make()), loop_of(row.make())
    train(plain, row)
    in_backward = row.optimizer is Idle
    plan = planner.plan(
        loop.model, batch(0), budget=int(0.75 * max(plain.peaks)), time_limit=2,
        hold_output=False, optimizer_in_backward=in_backward,
        optimizer="adamw" if in_backward else row.optimizer(trained(loop.model.parameters())))
    train(loop, row, plan.apply(loop.model))
    check(plain, loop, plan)


@pytest.mark.parametrize("name", ROWS)
def test_trainer(name: str, tmp_path: Path) -> None:
    if name.startswith(("bitsandbytes", "torchao")):
        pytest.importorskip(name.split()[0])
    row = ROWS[name]
    plain, loop = loop_of(row.make()), loop_of(row.make())
    train_by_trainer(plain, row, tmp_path, None)
    train_by_trainer(loop, row, tmp_path, int(0.75 * max(plain.peaks)))
    plan, status = planner.plan_of(loop.model), planner.status(loop.model)
    assert plan is not None and status is not None and status.planned_steps == STEPS
    check(plain, loop, plan)
