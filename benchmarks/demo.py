"""A 12-layer GPT-2 under a memory budget: planned, applied, trained, measured.

Run by `make demo`.  The batch is small enough for two cores and large enough that activations
outweigh parameters and optimizer state.  Plain and planned steps alternate on the same parameters,
so that both are timed under the same load.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import planner
from graph_capture.memory.allocator import record_peak
from planner.units import format_bytes

BATCH, SEQUENCE, VOCABULARY = 4, 192, 8192
BUDGET = "70%"
TIMED_STEPS = 2


def build_model() -> GPT2LMHeadModel:
    """GPT-2 small as published, dropout included, but with a smaller vocabulary."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, use_cache=False, bos_token_id=0,
        eos_token_id=0)).train()


class Training:
    """Real training steps of one batch, plain or planned."""

    def __init__(self, model: nn.Module, batch: dict[str, torch.Tensor],
                 optimizer: torch.optim.Optimizer) -> None:
        self.model, self.batch, self.optimizer = model, batch, optimizer
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def forward_backward(self) -> None:
        """Gradients of one batch."""
        output = self.model(**self.batch)
        output.loss.backward()
        self.losses.append(output.loss.item())

    def step(self) -> None:
        """One training step, timed."""
        started = time.perf_counter()
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - started)

    def measured_peak_bytes(self) -> int:
        """What forward and backward allocate at most, above what is resident."""
        peak_bytes = record_peak(self.forward_backward, "cpu").peak_bytes
        self.optimizer.zero_grad()
        return peak_bytes


def main() -> None:
    """Plan, apply, train and compare."""
    logging.set_verbosity_error()
    model = build_model()
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    print(f"GPT-2: 12 layers of width 768, batch {BATCH}, sequence {SEQUENCE}, AdamW, "
          f"budget {BUDGET} of the plain step", flush=True)
    started = time.perf_counter()
    plan = planner.plan(model, batch, budget=BUDGET, optimizer=optimizer)
    print(f"planned in {time.perf_counter() - started:.1f} s\n\n{plan}\n", flush=True)

    plain = Training(model, batch, optimizer)
    planned = Training(plan.apply(model), batch, optimizer)
    print("training ...", flush=True)
    planned.step()  # compiles
    planned.seconds.clear()
    plain_peak = plan.resident_bytes + plain.measured_peak_bytes()
    planned_peak = plan.resident_bytes + planned.measured_peak_bytes()
    for _ in range(TIMED_STEPS):
        plain.step()
        planned.step()
    for name, training in (("plain", plain), ("planned", planned)):
        print(f"losses of {name} steps: {' '.join(f'{loss:.3f}' for loss in training.losses)}")

    plain_seconds, planned_seconds = median(plain.seconds), median(planned.seconds)
    print(f"""
{'':24}{'plain':>12}{'planned':>12}
{'predicted peak':24}{format_bytes(plan.baseline_peak_bytes):>12}{format_bytes(plan.peak_bytes):>12}
{'measured peak':24}{format_bytes(plain_peak):>12}{format_bytes(planned_peak):>12}
{'seconds per step':24}{plain_seconds:>12.2f}{planned_seconds:>12.2f}
{'extra time':24}{'':>12}{planned_seconds / plain_seconds - 1:>12.1%}
{'estimated extra time':24}{'':>12}{plan.overhead:>12.1%}
""")
    if plan.budget_bytes is not None and planned_peak > plan.budget_bytes:
        raise SystemExit(f"the measured peak of {planned_peak:,} bytes is over the budget of "
                         f"{plan.budget_bytes:,}")


if __name__ == "__main__":
    main()
