"""Which backends, ranks, choices and devices combine: a table with one row for each.

    python -m benchmarks.combinations --budget 75%

The model is a small Llama with a large vocabulary.  `run`: the plan also ran here, on one device,
and `predicted` and `measured` are its peaks; with ranks it is planned, and the tests run such
plans on two.  `refused` gives the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

import planner
from benchmarks.arguments import benchmark_parser
from benchmarks.table import Table

BACKENDS = ("eager", "inductor")
RANKS = {
    "one": None,
    "DDP": planner.DataParallel("ddp", ranks=2),
    "FSDP2": planner.DataParallel("fsdp2", ranks=2, units=("model.layers.*",)),
}
CHOICES = {"recompute": (), "chunk": ("chunk",), "offload": ("offload",)}
DEVICES = ("cpu", "cuda")


def make_model() -> nn.Module:
    """Return a Llama whose loss head takes most of the memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=176, num_attention_heads=8,
        num_key_value_heads=1, vocab_size=4096, use_cache=False)).train()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = benchmark_parser("combinations", __doc__, time_limit=3)
    parser.add_argument("--budget", default="75%")
    options = parser.parse_args(arguments)
    ids = torch.zeros(4, 64, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    table = Table("backend:9", "ranks", "choice:9", "device", "outcome:10", "predicted:12,",
                  "measured:12,", "reason")
    for backend, (ranks, parallel), (choice, allow), device in itertools.product(
            BACKENDS, RANKS.items(), CHOICES.items(), DEVICES):
        if choice == "offload" and device == "cpu":
            continue
        model = make_model()
        outcome, predicted, measured, reason = "planned", None, None, ""
        try:
            plan = planner.plan(
                model, batch, budget=options.budget, backend=backend, parallel=parallel,
                allow=allow, device=device, gpu="H100" if device == "cuda" else None,
                time_limit=options.time_limit)
            predicted = plan.peak_bytes
            if parallel is None and device == "cpu":
                measured = planner.verify(model, plan, batch).peak_bytes
                outcome = "run"
        except planner.InfeasibleBudget as refusal:
            outcome = "infeasible"
            reason = (f"smallest {refusal.minimum_bytes:,} of "
                      f"{refusal.budget_bytes:,} bytes")
        except (planner.PlannerError, ValueError) as refusal:
            outcome, reason = "refused", str(refusal).partition(";")[0].partition(":")[0]
        table.row(backend, ranks, choice, device, outcome, predicted, measured, reason)


if __name__ == "__main__":
    main()
