"""Plans of one rank of Llama 3 8B and 70B under `fully_shard` by layer, without memory for tensors.

    python -m benchmarks.planned_large --model 8b --budget 80GB,64GB
    python -m benchmarks.planned_large --model 70b --batch 1 --budget 80GB,64GB

One rank of 8, and one of 64, for an H100: parameters and AdamW's state in bf16, gradients reduced
in float32, the model of transformers on `meta`, its output dropped.  `seconds` is wall time and
`CPU s` the time of this process, both with capture; `host GB` is the peak of its own memory.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import planner
from benchmarks.table import Table

# Layers, width, width inside, heads; ranks.
SIZES = {"8b": (32, 4096, 14336, 32, 8), "70b": (80, 8192, 28672, 64, 64)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def rank_of(size: str, dtype: str) -> tuple[LlamaForCausalLM, planner.DataParallel]:
    """Return the model, and its data-parallel setting."""
    layers, width, inside, heads, ranks = SIZES[size]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=width, intermediate_size=inside, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256, use_cache=False,
            max_position_embeddings=8192)).to(DTYPES[dtype])
    return model, planner.DataParallel("fsdp2", ranks=ranks, units=("model.layers.*",),
                                       param_dtype="bf16", reduce_dtype="fp32")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned_large",
                                     description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="8b")
    parser.add_argument("--batch", type=int, default=2, help="sequences of 8192 tokens a rank")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the shards")
    parser.add_argument("--budget", default="80GB,64GB")
    arguments = parser.parse_args(argv)
    table = Table("model", "ranks:d", "batch:d", "budget", "plain GB:.1f", "predicted GB:.2f",
                  "extra time:.2%", "at least:.2%", "seconds:.1f", "CPU s:.1f", "host GB:.2f")
    for budget in arguments.budget.split(","):
        model, ranks = rank_of(arguments.model, arguments.dtype)
        ids = torch.zeros(arguments.batch, 8192, dtype=torch.long, device="meta")
        clock, work = time.perf_counter(), time.process_time()
        try:
            plan = planner.plan(model, {"input_ids": ids, "labels": ids}, budget=budget,
                                optimizer="adamw", hold_output=False, parallel=ranks,
                                device="cuda", gpu="H100")
        except planner.InfeasibleBudget as refusal:
            print(f"{arguments.model}, {budget}: the least is {refusal.minimum_bytes / 1e9:.2f} GB")
            continue
        table.row(arguments.model, ranks.ranks, arguments.batch, budget,
                  plan.baseline_peak_bytes / 1e9, plan.peak_bytes / 1e9, plan.overhead,
                  plan.overhead_bound, time.perf_counter() - clock, time.process_time() - work,
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)
    return 0


if __name__ == "__main__":
    sys.exit(main())
