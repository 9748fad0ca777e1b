"""Chunked steps, measured: the smallest peaks with and without chunks, and a chunked loss by hand.

    python -m benchmarks.chunks --model gpt2,llama --vocabulary 32000 --rounds 7
    python -m benchmarks.chunks --model gpt2,t5 --attention eager --batch 2 --sequence 1024 \\
        --vocabulary 1024

All steps of one row of models run in turns in one process; times are medians of their ratios to the
plain step.  Peaks are allocator events above resident memory.  The models return only their loss.
The hand-written loss is the usual one: the head and the cross-entropy of a number of rows at a
time, each checkpointed, so that its backward computes the logits again.  BERT and T5 have none.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import planner
from benchmarks.arguments import add_numbers, benchmark_parser, parse
from benchmarks.measure import (
    MEGABYTE,
    gradients,
    peak_bytes,
    plan_or_smallest,
    relative_error,
    time_steps,
)
from benchmarks.models import WIDTH, WORKLOADS, Workload, returning_loss_only
from benchmarks.table import Table

CHUNKS = 16
"""Number of chunks of the loss that is written by hand."""
WITHOUT, WITH = ("recompute",), ("recompute", "chunk")
MODELS = ("gpt2", "llama")
NOT_BY_HAND = ("bert", "t5")
"""Models that are no causal language models."""


class ChunkedLoss(nn.Module):
    """A causal language model whose head and loss run a number of rows at a time."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the next tokens."""
        head = self.model.get_output_embeddings()
        hidden = self.model.base_model(input_ids=input_ids).last_hidden_state.flatten(0, 1)
        wanted = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        total = hidden.new_zeros((), dtype=torch.float32)
        for rows, of_rows in zip(hidden.chunk(CHUNKS), wanted.chunk(CHUNKS), strict=True):
            total = total + checkpoint(_summed, head, rows, of_rows, use_reentrant=False)
        return total / (wanted != -100).sum()


def _summed(head: nn.Module, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(rows).float(), wanted, reduction="sum")


def steps(workload: Workload, time_limit: float) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the steps of one model: the name, the model, and the plan's description."""
    returning = returning_loss_only(workload)
    yield "plain", returning.model, ""
    for name, allow in (("smallest", WITHOUT), ("smallest, in chunks", WITH)):
        plan = plan_or_smallest(lambda budget, allow=allow: planner.plan(
            returning.model, returning.inputs, budget=budget, allow=allow,
            loss_fn=returning.loss_fn, time_limit=time_limit))
        yield name, plan.apply(returning.model), _words(plan)
    if workload.name in NOT_BY_HAND:
        return
    by_hand = ChunkedLoss(copy.deepcopy(workload.model))
    yield f"chunked by hand ({CHUNKS})", by_hand, ""
    chunked = Workload(workload.name, by_hand, workload.inputs)
    limit = peak_bytes(chunked, by_hand)
    resident = planner.plan(returning.model, returning.inputs).resident_bytes
    try:
        plan = planner.plan(returning.model, returning.inputs, budget=resident + limit, allow=WITH,
                            time_limit=time_limit)
    except planner.InfeasibleBudget as refusal:
        least = (refusal.minimum_bytes - resident) / MEGABYTE
        print(f"no plan at the peak of the hand-written loss: at least {least:.2f} MB")
    else:
        yield "planned at its peak", plan.apply(returning.model), _words(plan)


def _words(plan: planner.Plan) -> str:
    above = (plan.peak_bytes - plan.resident_bytes) / MEGABYTE
    return (f"{plan.spec.chunks} chunks, predicted {above:.2f} MB, "
            f"{plan.overhead:.1%} >= {plan.overhead_bound:.1%}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = benchmark_parser("chunks", __doc__, models=MODELS, known=MODELS + NOT_BY_HAND,
                              rounds=7, threads=1, time_limit=20.0)
    add_numbers(parser, "--vocabulary", (32000,), "sizes of the vocabulary")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa",
                        help="fused, or each op by itself")
    parser.add_argument("--width", type=int, default=WIDTH)
    options = parse(parser, argv)
    table = Table("model:7", "vocabulary:8", "step:24", "peak MB:9.2f", "time:>19", "gradient:.1e",
                  "plan")
    for name in options.model:
        for vocabulary in options.vocabulary:
            workload = WORKLOADS[name](batch=options.batch, sequence=options.sequence,
                                       width=options.width, vocabulary=int(vocabulary))
            workload.model.set_attn_implementation(options.attention)
            workload.model.to(getattr(torch, options.dtype)).eval()
            found = list(steps(workload, options.time_limit))
            returning = returning_loss_only(workload)
            models = [model for _, model, _ in found]
            times = time_steps(returning, models, options.rounds)
            expected = gradients(returning, models[0])
            for index, (step, model, words) in enumerate(found):
                table.row(name, int(vocabulary), step, peak_bytes(returning, model) / MEGABYTE,
                          times.ratio(index, 0),
                          relative_error(gradients(returning, model), expected), words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
