"""Training steps captured for the solvers: the models of `benchmarks.models`, and large ones on the
meta device, of which nothing but shapes exists.

    python -m benchmarks.captured llama_8b -o llama_8b.problem

prints how long capture takes and what it holds at most, and writes the scheduling problem.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import benchmark_parser, parse
from benchmarks.models import WORKLOADS
from benchmarks.problem_file import save_problem
from planner.api import capture
from planner.step.prepared import PreparedStep


def _gpt2(layers: int) -> tuple[nn.Module, Mapping[str, Any]]:
    """GPT-2 medium's layers, batch 8, 1024 tokens, a small vocabulary, dropout as published."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(
            n_layer=layers, n_embd=1024, n_head=16, vocab_size=4096, n_positions=1024,
            bos_token_id=0, eos_token_id=0, use_cache=False))
        ids = torch.zeros(8, 1024, dtype=torch.long)
    return model.train(), {"input_ids": ids, "labels": ids}


def _llama(layers: int, width: int, inside: int, heads: int) -> tuple[nn.Module, Mapping[str, Any]]:
    """Llama 3 in bfloat16, 8 sequences of 4096 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=inside,
            num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256,
            max_position_embeddings=8192, use_cache=False)).to(torch.bfloat16)
        ids = torch.zeros(8, 4096, dtype=torch.long)
    return model.train(), {"input_ids": ids, "labels": ids}


LARGE: dict[str, Callable[[], tuple[nn.Module, Mapping[str, Any]]]] = {
    **{f"gpt2_{layers}": lambda layers=layers: _gpt2(layers) for layers in (12, 24, 48, 96)},
    "llama_8b": lambda: _llama(32, 4096, 14336, 32),
    "llama_70b": lambda: _llama(80, 8192, 28672, 64),
}
"""Models on the meta device by name; the number is that of layers."""


def captured(name: str) -> PreparedStep:
    """The training step of a model of `LARGE` or of `benchmarks.models`."""
    if name in LARGE:
        model, inputs = LARGE[name]()
        return capture(model, inputs)
    work = WORKLOADS[name]()
    return capture(work.model, work.inputs, loss_fn=work.loss_fn)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = benchmark_parser("captured", __doc__)
    parser.add_argument("model", choices=[*LARGE, *WORKLOADS])
    parser.add_argument("-o", "--output", type=Path, help="where to write the problem")
    arguments = parse(parser, argv)
    start = time.monotonic()
    step = captured(arguments.model)
    seconds = time.monotonic() - start
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{arguments.model}: {len(step.base.problem)} ops captured in {seconds:.1f} s, at most "
          f"{held / 2**30:.2f} GiB of host memory; a step without recomputation peaks at "
          f"{step.keep_all_peak_bytes / 1e9:.2f} GB, {step.resident_bytes / 1e9:.2f} GB resident")
    if arguments.output is not None:
        save_problem(step.base.problem, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
