"""What torch's allocator would reserve on a GPU: models of full size, plain and planned.

    python -m benchmarks.reserved --model gpt2,llama-1b --budgets .8,.6

Nothing is run and no GPU is needed.  Budgets are fractions of the plain step's peak; each plan is
replayed with the allocator's default settings and with expandable segments.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.arguments import add_numbers, benchmark_parser, parse
from benchmarks.table import Table
from planner.api import capture
from planner.errors import InfeasibleBudget
from planner.search.eager import schedule_within
from planner.search.effort import Effort
from planner.step.loop_trace import MicroSteps, compose
from planner.step.reserved import replay_loop
from solvers.simulator import unroll

GIGABYTE = 1e9
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
SHAPES = {"gpt2": (8, 1024), "llama-1b": (4, 2048), "llama-8b": (1, 8192)}
"""Batch and sequence."""


def make(name: str) -> nn.Module:
    """A model without values."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        if name == "gpt2":
            return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0))
        if name == "llama-1b":
            return LlamaForCausalLM(LlamaConfig(**LLAMA_1B))
        return LlamaForCausalLM(LlamaConfig(**LLAMA_8B)).bfloat16()


def run(name: str, budgets: Sequence[float], time_limit: float, table: Table) -> None:
    """Print the rows of one model."""
    ids = torch.zeros(SHAPES[name], dtype=torch.long, device="meta")
    prepared = capture(make(name), {"input_ids": ids, "labels": ids.clone()}, optimizer="adamw",
                       device="cuda")
    around = prepared.surroundings
    assert around is not None and around.plain is not None

    def show(budget: str, micro_steps: MicroSteps, overhead: float | None) -> None:
        started = time.perf_counter()
        loop = compose(around.resident, micro_steps, around.optimizer, around.loop)
        found = [replay_loop(loop, around.workspace_bytes, expandable=expandable)
                 for expandable in (False, True)]
        seconds = time.perf_counter() - started
        allocated = prepared.baseline_peak_bytes if overhead is None else planned
        table.row(name, budget, allocated / GIGABYTE,
                  *(part for each in found for part in (
                      each.reserved_bytes / GIGABYTE, each.reserved_bytes / allocated)),
                  None if overhead is None else 100 * overhead, len(loop.trace.events), seconds)

    planned = 0
    show("plain", around.plain, None)
    for fraction in budgets:
        try:
            form, result = schedule_within(
                prepared, int(fraction * prepared.baseline_peak_bytes), Effort(
                    time_limit=time_limit))
        except InfeasibleBudget:
            continue
        planned = form.peak_bytes(result.schedule)
        timeline = unroll(form.problem, result.schedule)
        show(f"{fraction:.0%}", around.planned(form.graph, timeline),
             form.overhead(result.schedule))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = benchmark_parser("reserved", __doc__, models=("gpt2", "llama-1b"), known=SHAPES,
                              time_limit=20.0)
    add_numbers(parser, "--budgets", (0.8, 0.6), "fractions of the plain step's peak")
    arguments = parse(parser, argv)
    table = Table("model:8", "budget:>6", "allocated GB:.2f", "reserved GB:.2f", "ratio:.3f",
                  "expandable GB:.2f", "ratio:.3f", "overhead %:.2f", "events:d", "replay s:.2f")
    for name in arguments.model:
        run(name, arguments.budgets, arguments.time_limit, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
