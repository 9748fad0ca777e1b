"""Compare steps of torch's own code for CUDA with their predictions, on a machine without a GPU.

    python -m benchmarks.cuda_on_no_device --torch /path/to/python [--model gpt2,llama,bert,t5]

`--torch` is the Python of an environment with a CUDA build of torch and this package's needs.
There each step runs twice: predicted, on `meta`; and by torch's code for CUDA on the device of
`no_device.c`, whose kernels and cuBLAS do nothing (`no_kernels.c`), so that all values are zeros.
The compared value is the memory that the step requests from torch's allocator at its peak. bf16, 4
x 256 tokens, 4 layers of 512, vocabulary of 8000; "loop" is the second step of a loop with the
optimizer.

Left out: ops of cuDNN (convolutions, attention on H100).
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.allocator import no_device_parser, on_no_device
from benchmarks.table import Table

GPU = "A100"
MODELS = ("gpt2", "llama", "bert", "t5")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gpt2": {"lr": 1e-3}, "llama": {"lr": 1e-3, "foreach": False},
    "bert": {"lr": 1e-3, "amsgrad": True, "fused": True},
    "t5": {"lr": 1e-3, "foreach": True}}
"""Settings of AdamW."""


def build(name: str, device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model and its batch."""
    import transformers as t

    with torch.device(device):
        ids = torch.zeros(4, 256, dtype=torch.long)
        model: nn.Module = {
            "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(
                n_layer=4, n_embd=512, n_head=8, vocab_size=8000, use_cache=False,
                loss_type="ForCausalLMLoss")),
            "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(
                hidden_size=512, intermediate_size=1536, num_hidden_layers=4, vocab_size=8000,
                num_attention_heads=8, num_key_value_heads=2, use_cache=False)),
            "bert": lambda: t.BertForMaskedLM(t.BertConfig(
                hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
                intermediate_size=2048, vocab_size=8000)),
            "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(
                d_model=512, d_ff=2048, num_layers=4, num_heads=8, vocab_size=8000,
                decoder_start_token_id=0, use_cache=False))}[name]()
    return model.to(torch.bfloat16).train(), {"input_ids": ids, "labels": ids}


def predict(folder: str, names: Sequence[str]) -> None:
    """Print the predicted peaks, and write the plans to `folder`."""
    import planner

    found: dict[str, dict[str, int]] = {}
    for name in names:
        model, inputs = build(name, "meta")
        what: dict[str, Any] = {"device": "cuda", "gpu": GPU}
        stepper = torch.optim.AdamW(model.parameters(), **OPTIMIZERS[name])
        loop = planner.memory(model, inputs, optimizer=stepper, **what)
        what |= {"hold_output": False, "time_limit": 20.0}
        try:
            plan = planner.plan(model, inputs, budget="60%", **what)
        except planner.InfeasibleBudget as error:
            plan = planner.plan(model, inputs, budget=error.minimum_bytes, **what)
        plan.save(Path(folder, f"{name}.json"))
        found[name] = {"plain": plan.baseline_peak_bytes, "planned": plan.peak_bytes,
                       "loop": loop.steady.peak_bytes}
    print(json.dumps(found))


def measure(folder: str, names: Sequence[str]) -> None:
    """Print the peaks of the memory that torch's code requests."""
    import planner

    found: dict[str, dict[str, int]] = {}
    # The workspaces of cuBLAS and cuBLASLt, of this thread and of that of the backward.
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    warm = nn.functional.linear(weight @ weight, weight, weight[0])
    warm.register_hook(lambda gradient: torch.addmm(
        torch.zeros(64, device="cuda"), gradient, gradient))
    warm.sum().backward()
    del weight, warm
    for name in names:
        peaks = found[name] = {}
        for kind in ("plain", "planned", "loop"):
            gc.collect()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            model, inputs = build(name, "cuda")
            if kind == "planned":
                model = planner.load(Path(folder, f"{name}.json")).apply(model)
            stepper = (torch.optim.AdamW(model.parameters(), **OPTIMIZERS[name])
                       if kind == "loop" else None)
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                output: Any = model(**inputs)
                loss = output.loss
                if stepper is None:
                    del output
                loss.backward()
                if stepper is not None:
                    stepper.step()
                    output = None
                model.zero_grad()
                del loss
            peaks[kind] = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
            del model, inputs, stepper
    print(json.dumps(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = no_device_parser("cuda_on_no_device", __doc__, models=MODELS, known=MODELS)
    arguments = parser.parse_args(argv)
    here = {"PYTHONPATH": str(Path(__file__).parents[1]), "CHECKPOINT_PLANNER_CACHE": ""}
    table = Table("model:8", "step:8", "predicted:,d", "asked for:,d", "difference:,d", "%:+.3f")
    with tempfile.TemporaryDirectory() as folder:
        def child(what: str) -> list[str]:
            return ["-c", "from benchmarks.cuda_on_no_device import predict, measure\n"
                    f"{what}({folder!r}, {arguments.model!r})"]

        predicted = json.loads(subprocess.run(
            [arguments.torch, "-W", "ignore", *child("predict")], check=True, text=True,
            stdout=subprocess.PIPE, env={**os.environ, **here}).stdout.splitlines()[-1])
        measured = json.loads(on_no_device(
            arguments.torch, arguments.include, child("measure"),
            {**here, "NO_DEVICE_CAPABILITY": "8.0"}).splitlines()[-1])
    for name in arguments.model:
        for kind, asked in measured[name].items():
            said = predicted[name][kind]
            table.row(name, kind, said, asked, said - asked, 100 * (said / asked - 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
