"""Published peaks of GPU training set-ups beside those predicted without a GPU.

    python -m benchmarks.ladder --table torchtune,liger,bert
    python -m benchmarks.ladder --table plans --time-limit 60

Models are transformers' on `meta`, planned for an A100.  `torchtune`: Llama 3.2 3B, bf16, batch
2 x 4096 (README of torchtune); `liger`: the loss head of Liger-Kernel's `benchmark_fused_linear_
cross_entropy.py` of November 2024; `bert`: transformers' page "Model training anatomy"; `plans`:
the same 3B model planned at each of torchtune's peaks.  Rows with 8-bit AdamW or NF4 weights need
bitsandbytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import planner
from benchmarks.arguments import add_names, benchmark_parser
from benchmarks.measure import plan_or_smallest
from benchmarks.table import Table

MIB, GIB = 2**20, 2**30
GPU = "A100"
TABLES = ("torchtune", "plans", "liger", "bert")
_CUBLAS_BYTES = 2 * 8_519_680
"""cuBLAS' workspaces, of the forward's thread and of the backward's."""


class SetUp(NamedTuple):
    """One row of torchtune's table."""

    name: str
    published: float
    """GiB, "peak memory active"."""
    weights: str = "bf16"
    checkpointed: bool = False
    optimizer: str = "adamw"
    in_backward: bool = False
    reason: str = ""


TORCHTUNE = (
    SetUp("packed", 60.0, reason="none"),
    SetUp("+ compile", 51.0, reason="Inductor's code for a GPU is not made without one"),
    SetUp("+ chunked loss", 42.9, reason="as above"),
    SetUp("+ checkpointing", 24.9, checkpointed=True,
          reason="the loss of a chunk is not compiled"),
    SetUp("+ optimizer in backward", 23.1, checkpointed=True, in_backward=True, reason="none"),
    SetUp("+ activation offload", 21.8, checkpointed=True, in_backward=True,
          reason="without the offload of 1.3 GiB, 28 layers of 2 x 4096 x 3072"),
    SetUp("+ 8-bit AdamW", 17.6, checkpointed=True, in_backward=True, optimizer="adamw8bit",
          reason="without the offload; which 8-bit AdamW is not stated"),
    SetUp("LoRA", 8.5, weights="lora", checkpointed=True,
          reason="without the offload; 1.5 GiB of float32 logits of a chunk"),
    SetUp("QLoRA", 4.6, weights="qlora", checkpointed=True, reason="as LoRA"),
)


def llama_3b(weights: str = "bf16") -> LlamaForCausalLM:
    """Create Llama 3.2 3B on `meta`: all of it trained, or LoRA of rank 64 on a frozen base."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
            num_key_value_heads=8, head_dim=128, vocab_size=128256, tie_word_embeddings=True,
            use_cache=False, max_position_embeddings=131072)).to(torch.bfloat16)
    return model if weights == "bf16" else with_lora(model, quantized=weights == "qlora")


def with_lora(model: LlamaForCausalLM, *, quantized: bool) -> LlamaForCausalLM:
    """Add torchtune's adapters to a model, whose layers become NF4 first if asked for."""
    from peft import LoraConfig, inject_adapter_in_model

    if quantized:
        for name, module in list(model.model.layers.named_modules()):
            if isinstance(module, nn.Linear):
                model.model.layers.set_submodule(name, nf4_linear(module))
    model.requires_grad_(False)
    with torch.device("meta"):
        inject_adapter_in_model(LoraConfig(r=64, lora_alpha=128, target_modules=[
            "q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]), model)
        return model.to(torch.bfloat16) if not quantized else _adapters_in_bf16(model)


def _adapters_in_bf16(model: LlamaForCausalLM) -> LlamaForCausalLM:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def nf4_linear(module: nn.Linear) -> nn.Module:
    """Create bitsandbytes' NF4 layer of the size of `module`, with nested constants, on `meta`."""
    import bitsandbytes as bnb

    size = module.weight.shape
    blocks = module.weight.numel() // 64
    with torch.device("meta"):
        state = bnb.functional.QuantState(
            absmax=torch.empty(blocks, dtype=torch.uint8), shape=size, code=torch.empty(16),
            blocksize=64, quant_type="nf4", dtype=torch.bfloat16, offset=torch.empty(()),
            state2=bnb.functional.QuantState(absmax=torch.empty(-(-blocks // 256)), blocksize=256,
                                             code=torch.empty(256), dtype=torch.float32))
        layer = bnb.nn.Linear4bit(size[1], size[0], bias=False, compute_dtype=torch.bfloat16,
                                  quant_type="nf4")
        layer.weight = bnb.nn.Params4bit(
            torch.empty(module.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False,
            quant_state=state, blocksize=64, quant_type="nf4", bnb_quantized=True)
    return layer


class ChunkedLoss(nn.Module):
    """torchtune's `CEWithChunkedOutputLoss`: logits in 8 chunks, float32 for one chunk at a time.

    torchtune compiles the loss of a chunk, which then saves no float32 logits; here a checkpoint
    does the same.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=input_ids).last_hidden_state.flatten(0, 1)
        logits = [self.model.lm_head(rows) for rows in hidden.chunk(8)]
        losses = [checkpoint(_summed_loss, *pair, use_reentrant=False)
                  for pair in zip(logits, labels.flatten().chunk(8), strict=True)]
        return torch.stack(losses).sum() / labels.numel()


def _summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


class LossHead(nn.Module):
    """The state of Liger's benchmark: its head and torch's on the device, the input a leaf whose
    gradient stays from one iteration to the next."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(rows, 4096, dtype=torch.bfloat16))
        self.lin = nn.Linear(4096, 128256, bias=False, dtype=torch.bfloat16)
        self.liger = nn.Linear(4096, 128256, bias=False, dtype=torch.bfloat16)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lin(self.x), labels)


def torchtune() -> None:
    """Print the peak of each step of torchtune's table."""
    table = Table("set-up:<24", "published GiB:.1f", "predicted GiB:.2f", "deviation:+.1%",
                  "its reason:<60", "CPU s:.0f")
    for row in TORCHTUNE:
        started = time.process_time()
        predicted = None if "compile" in row.name or "loss" in row.name or not _known(row) else (
            _predicted_bytes(row) / GIB)
        table.row(row.name, row.published, predicted,
                  None if predicted is None else predicted / row.published - 1, row.reason,
                  time.process_time() - started)


def _predicted_bytes(row: SetUp) -> int:
    model: nn.Module = llama_3b(row.weights)
    labels = {"input_ids": _ids(), "labels": _ids()}
    if not row.checkpointed:
        return planner.memory(model, labels, optimizer=torch.optim.AdamW(
            model.parameters(), fused=True), device="cuda", gpu=GPU).peak_bytes
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return planner.memory(ChunkedLoss(model), labels, optimizer=_optimizer(row, model),
                          optimizer_in_backward=row.in_backward, device="cuda",
                          gpu=GPU).peak_bytes


def _optimizer(row: SetUp, model: nn.Module) -> object:
    return row.optimizer if row.in_backward else torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], fused=True)


def plans(time_limit: float, only: Sequence[str]) -> None:
    """Print the plan with the least estimated time at each peak of torchtune's table."""
    table = Table("peak of:<24", "budget GiB:.1f", "peak GiB:.2f", "extra time:.2%", "at least:.2%",
                  "smallest GiB:.2f", "CPU s:.0f")
    for row in TORCHTUNE:
        if not _known(row) or (only and row.name not in only):
            continue
        started = time.process_time()
        plan, smallest = _planned(row, time_limit)
        table.row(row.name, row.published, *(
            (None, None, None) if plan is None else
            (plan.peak_bytes / GIB, plan.overhead, plan.overhead_bound)),
            None if smallest is None else smallest / GIB, time.process_time() - started)


def _planned(row: SetUp, time_limit: float) -> tuple[planner.Plan | None, int | None]:
    """The plan within the published peak, or the smallest peak that the planner finds instead."""
    model = llama_3b(row.weights)
    try:
        return planner.plan(
            model, {"input_ids": _ids(), "labels": _ids()},
            budget=int(row.published * GIB), optimizer=_optimizer(row, model),
            optimizer_in_backward=row.in_backward, hold_output=False, allow="chunk",
            device="cuda", gpu=GPU, time_limit=time_limit), None
    except planner.InfeasibleBudget as refusal:
        return None, refusal.minimum_bytes


def liger() -> None:
    """Print the peak of Liger's loss head, plain, and the smallest one that chunks reach."""
    table = Table("rows:d", "plain, published MiB:.2f", "predicted MiB:.2f",
                  "fused, published MiB:.2f", "smallest with chunks MiB:.2f", "extra time:.1%",
                  "CPU s:.0f")
    for rows, plain, fused in ((4096, 6092.28, 4245.55), (8192, 9162.31, 4466.97),
                               (16384, 15302.38, 4910.44), (32768, 27582.50, 5794.63)):
        started = time.process_time()
        with torch.device("meta"):
            head, labels = LossHead(rows), torch.empty(rows, dtype=torch.long)
        # The second micro-batch finds the gradients of the first.
        predicted = planner.memory(head, labels, accumulation=2, device="cuda",
                                   gpu=GPU).peak_bytes + _CUBLAS_BYTES
        smallest = plan_or_smallest(lambda budget, head=head, labels=labels: planner.plan(
            head, labels, budget=budget, accumulation=2, allow="chunk", device="cuda", gpu=GPU))
        table.row(rows, plain, predicted / MIB, fused,
                  (smallest.peak_bytes + _CUBLAS_BYTES) / MIB, smallest.overhead,
                  time.process_time() - started)


def bert() -> None:
    """Print what nvidia-smi shows of BERT-large's training, and what torch reserves for it."""
    table = Table("set-up:<24", "published MB:.0f", "predicted MB:.0f", "deviation:+.1%")
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
            intermediate_size=4096, attn_implementation="eager")).train()
        inputs = {"input_ids": torch.zeros(4, 512, dtype=torch.long),
                  "labels": torch.zeros(4, dtype=torch.long)}
    report = planner.memory(model, inputs, optimizer="adamw", grad_clip=1.0, device="cuda",
                            gpu="V100")
    assert report.reserved_bytes is not None
    # The page's 1343 MiB are what nvidia-smi shows once CUDA's kernels are loaded.
    predicted = report.reserved_bytes / MIB + 1343
    table.row("BERT-large, 4 x 512", 14949, predicted, predicted / 14949 - 1)


def _ids() -> torch.Tensor:
    return torch.zeros(2, 4096, dtype=torch.long, device="meta")


def _known(row: SetUp) -> bool:
    """True if the libraries that this row needs are installed."""
    return (row.weights, row.optimizer) in (("bf16", "adamw"), ("lora", "adamw")) or (
        find_spec("bitsandbytes") is not None)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = benchmark_parser("ladder", __doc__, time_limit=60)
    add_names(parser, "--table", TABLES, ("torchtune", "liger", "bert"))
    parser.add_argument("--row", action="append", default=[], help="of the table of plans")
    arguments = parser.parse_args(argv)
    for name in arguments.table:
        if name == "plans":
            plans(arguments.time_limit, arguments.row)
        else:
            {"torchtune": torchtune, "liger": liger, "bert": bert}[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
