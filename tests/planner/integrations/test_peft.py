"""`planner.within` for models that PEFT has given adapters."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import planner
from tests.support.measured_loops import MeasuredLoop, Trial
from tests.support.models import gpt2, llama

peft = pytest.importorskip("peft")

CASES = {
    "gpt2": (partial(gpt2, layers=2, width=32, batch=8, vocab=128),
             {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "llama": (partial(llama, layers=2, width=32, batch=8, vocab=128),
              {"target_modules": ["q_proj", "v_proj"]}),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_adapters_of_low_rank(name):
    case, targets = CASES[name]
    batch = case().kwargs

    def model() -> torch.nn.Module:
        net = case().model
        return peft.get_peft_model(net, peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_dropout=0.1, **targets))

    def train(loop: MeasuredLoop, budget: int | None) -> None:
        net = loop.model if budget is None else planner.within(loop.model, budget, time_limit=1)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)

        def run() -> None:
            for _ in range(3):
                loop.begin_step()
                loss = net(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loop.note_loss(loss)

        loop.run(run)

    trial = Trial.of(model, train)
    trial.check(steps=3)
    assert trial.budgeted.losses == trial.plain.losses
    if name == "gpt2":
        trial.check_equal()
    else:  # in which Dynamo alone adds gradients up in another order
        trial.check_near(model, train)
