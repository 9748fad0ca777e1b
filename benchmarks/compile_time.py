"""Time to compile the applied model, for the whole model and by blocks, as it gets deeper.

    python -m benchmarks.compile_time --layers 6,12,24 --budgets none,70

Seconds of CPU of the first step of the applied model less those of the second; one thread.  By
blocks, code is compiled once for each different decision; "decisions" counts them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from torch import nn

from apply.blocks import count_decisions
from benchmarks.arguments import benchmark_parser, parse
from planner.api import capture
from planner.planning import Effort, plan_within


def gpt2(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A narrow GPT-2 of this depth, and a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=128, n_head=4, vocab_size=512,
                                       n_positions=64, use_cache=False))
    ids = torch.randint(0, 512, (4, 64))
    return model, {"input_ids": ids, "labels": ids}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = benchmark_parser("compile_time", __doc__, time_limit=20.0)
    parser.add_argument("--layers", default="6,12,24")
    parser.add_argument("--budgets", default="none,70", help="percentages of the plain peak")
    options = parse(parser, arguments)
    torch.set_num_threads(1)
    print("| regions | budget | layers | decisions | capture s | compile s |")
    print("|---------|-------:|-------:|----------:|----------:|----------:|")
    for regions in ("model", "blocks"):
        for budget in options.budgets.split(","):
            for layers in map(int, options.layers.split(",")):
                measure(regions, budget, layers, options.time_limit)
    return 0


def measure(regions: str, budget: str, layers: int, time_limit: float) -> None:
    """Print one line."""
    model, batch = gpt2(layers)
    started = time.process_time()
    prepared = capture(model, batch, regions=regions)
    capture_seconds = time.process_time() - started
    limit = None if budget == "none" else int(prepared.baseline_peak_bytes * int(budget) / 100)
    plan = plan_within(prepared, limit, Effort(time_limit=time_limit))
    applied = plan.apply(model)
    seconds = []
    for _ in range(2):
        started = time.process_time()
        applied(**batch).loss.backward()
        seconds.append(time.process_time() - started)
    print(f"| {regions:<7} | {budget:>6} | {layers:6} | {count_decisions(plan.recipe):9} "
          f"| {capture_seconds:9.1f} | {seconds[0] - seconds[1]:9.1f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
