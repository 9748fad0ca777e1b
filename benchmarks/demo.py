"""A 12-layer GPT-2 under a memory budget: planned, applied, trained, measured.

Run by `make demo`.  The batch is small enough for two cores and large enough that activations
outweigh the parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import planner
from graph_capture.allocator import record_peak
from planner.units import format_bytes

BATCH, SEQUENCE = 4, 256
BUDGET = "65%"
STEPS = 4


def build_model() -> GPT2LMHeadModel:
    """GPT-2 small as published, dropout included, but for a vocabulary of 8,192."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=8192, n_positions=SEQUENCE, use_cache=False,
                                      bos_token_id=0, eos_token_id=0)).train()


def main() -> None:
    """Plan, apply, train and compare."""
    model = build_model()
    ids = torch.randint(0, 8192, (BATCH, SEQUENCE))
    batch = {"input_ids": ids, "labels": ids}

    print(f"GPT-2: 12 layers of width 768, batch {BATCH}, sequence {SEQUENCE}, "
          f"budget {BUDGET} of the plain step, AdamW")
    started = time.perf_counter()
    plan = planner.plan(model, batch, budget=BUDGET, optimizer="adamw")
    print(f"planned in {time.perf_counter() - started:.1f} s\n")
    print(plan, "\n")

    planned = plan.apply(model)
    print(planner.verify(model, plan, batch), "\n")

    plain_peak, plain_seconds = measure(model, batch, "plain step")
    planned_peak, planned_seconds = measure(planned, batch, "planned step")
    optimizer_bytes = 0 if plan.optimizer is None else plan.optimizer.state_bytes
    resident = plan.resident_bytes - optimizer_bytes
    print(f"\n{'':24}{'plain':>12}{'planned':>12}")
    print(f"{'predicted peak':24}{format_bytes(plan.baseline_peak_bytes):>12}"
          f"{format_bytes(plan.peak_bytes):>12}")
    print(f"{'measured peak':24}{format_bytes(resident + optimizer_bytes + plain_peak):>12}"
          f"{format_bytes(resident + optimizer_bytes + planned_peak):>12}")
    print(f"{'step time (median)':24}{plain_seconds:>10.2f} s{planned_seconds:>10.2f} s")
    print(f"{'extra time':24}{'':>12}{planned_seconds / plain_seconds - 1:>12.1%}"
          f"   (estimated {plan.overhead:.1%})")


def measure(model: nn.Module, batch: dict[str, torch.Tensor], name: str) -> tuple[int, float]:
    """Peak of forward and backward above resident memory, and the median time of a whole step with
    AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses: list[float] = []

    def forward_backward() -> None:
        optimizer.zero_grad(set_to_none=True)
        output = model(**batch)
        output.loss.backward()
        losses.append(output.loss.item())

    def step() -> None:
        forward_backward()
        optimizer.step()

    step()  # compiles, and makes the optimizer's state
    seconds = [timed(step) for _ in range(STEPS)]
    optimizer.zero_grad(set_to_none=True)
    peak = record_peak(forward_backward, "cpu").peak_bytes
    print(f"{name}: losses {' '.join(f'{loss:.3f}' for loss in losses)}")
    return peak, median(seconds)


def timed(run: Callable[[], None]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
