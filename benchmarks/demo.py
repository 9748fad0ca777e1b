"""A 12-layer GPT-2 under a memory budget: planned, applied, trained, measured.

Run by `make demo`.  The batch is small enough for two cores and large enough that activations
outweigh parameters and optimizer state.  Two copies of the model take the same steps, one plain and
one planned: the same initial parameters, the same batches, and dropout from the same seeds, so that
their losses are one series.  Their steps alternate, so that both are timed under the same load.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn
from transformers.utils import logging

import planner
from benchmarks.models import gpt2
from planner._graph_capture.memory.allocator import record_peak
from planner.units import format_bytes

BATCH, SEQUENCE, VOCABULARY = 4, 192, 8192
BUDGET = "70%"
TIMED_STEPS = 2
ROUNDING = 1e-5
"""Relative difference of the loss that another order of adding up may cause in these few steps."""


def build_model() -> nn.Module:
    """Build GPT-2 small as published, dropout included, but with a smaller vocabulary."""
    return gpt2(sequence=SEQUENCE, layers=12, width=768, heads=12, vocabulary=VOCABULARY).model


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """Return random tokens, the same for the same seed."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=source)
    return {"input_ids": ids, "labels": ids}


class Training:
    """Real training steps, plain or planned; batch and dropout depend on the step's number only."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def forward_backward(self) -> None:
        """Compute the gradients of one batch."""
        torch.manual_seed(len(self.losses))
        output = self.model(**make_batch(len(self.losses)))
        output.loss.backward()
        self.losses.append(output.loss.item())

    def step(self) -> None:
        """Run one training step, and time it."""
        started = time.perf_counter()
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - started)

    def measured_peak_bytes(self) -> int:
        """Return the peak of forward and backward above resident memory."""
        peak_bytes = record_peak(self.forward_backward, "cpu").peak_bytes
        self.optimizer.zero_grad()
        return peak_bytes


def main() -> None:
    """Plan, apply, train and compare."""
    logging.set_verbosity_error()
    models = build_model(), build_model()
    plain, planned = (Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
                      for model in models)

    print(f"GPT-2: 12 layers of width 768, batch {BATCH}, sequence {SEQUENCE}, AdamW, "
          f"budget {BUDGET} of the plain step", flush=True)
    started = time.perf_counter()
    plan = planner.plan(planned.model, make_batch(0), budget=BUDGET, optimizer=planned.optimizer)
    print(f"planned in {time.perf_counter() - started:.1f} s\n\n{plan}\n", flush=True)

    planned.model = plan.apply(planned.model)
    print("training ...", flush=True)
    for training in (plain, planned):
        training.step()  # the planned one compiles
        training.seconds.clear()
    plain_peak = plan.resident_bytes + plain.measured_peak_bytes()
    planned_peak = plan.resident_bytes + planned.measured_peak_bytes()
    for _ in range(TIMED_STEPS):
        plain.step()
        planned.step()
    print(f"{'loss':24}{'plain':>12}{'planned':>12}")
    for number, losses in enumerate(zip(plain.losses, planned.losses, strict=True)):
        print(f"step {number:<19}{losses[0]:>12.6f}{losses[1]:>12.6f}")
    difference = max(abs(one - other) / abs(one)
                     for one, other in zip(plain.losses, planned.losses, strict=True))
    print(f"largest difference: {difference:.1e} of the loss")

    plain_seconds, planned_seconds = median(plain.seconds), median(planned.seconds)
    print(f"""
{'':24}{'plain':>12}{'planned':>12}
{'predicted peak':24}{format_bytes(plan.baseline_peak_bytes):>12}{format_bytes(plan.peak_bytes):>12}
{'measured peak':24}{format_bytes(plain_peak):>12}{format_bytes(planned_peak):>12}
{'seconds per step':24}{plain_seconds:>12.2f}{planned_seconds:>12.2f}
{'extra time':24}{'':>12}{planned_seconds / plain_seconds - 1:>12.1%}
{'estimated extra time':24}{'':>12}{plan.overhead:>12.1%}
""")
    if difference > ROUNDING:
        raise SystemExit(f"the losses differ by {difference:.1e}, more than by rounding")
    if plan.budget_bytes is not None and planned_peak > plan.budget_bytes:
        raise SystemExit(f"the measured peak of {planned_peak:,} bytes is over the budget of "
                         f"{plan.budget_bytes:,}")


if __name__ == "__main__":
    main()
