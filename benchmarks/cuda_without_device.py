"""What models take on GPUs that are not here: plain peak, peak under a plan, kernels and rules.

    python -m benchmarks.cuda_without_device [--gpu H100,A100,RTX 4090] [--model gpt2,llama]
    python -m benchmarks.cuda_without_device --torchtitan

Parameters are on `meta`, nothing is executed, and no GPU is asked: these are predictions.  Models
have published sizes; all parameters and inputs are in the dtype named, the optimizer is AdamW as
torch runs it on a GPU (`foreach`), the output is let go when the loss is made.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import planner
from benchmarks.cuda import with_checkpoints
from benchmarks.models import _resnet, _UNet
from benchmarks.table import Table
from planner.errors import InfeasibleBudget

GPUS = ("H100", "A100", "RTX 4090")
DTYPES = (torch.bfloat16, torch.float32)


class Sized(NamedTuple):
    """A model on `meta`, and its batch."""

    batch: str
    model: nn.Module
    inputs: tuple[Tensor, ...] | Mapping[str, Tensor]
    loss_fn: Callable[[Any], Tensor] | None = None


def _ids(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def _text(kind: str, batch: int, length: int, **sizes: int) -> Sized:
    import transformers

    config, model = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
        "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration)}[kind]
    ids = _ids(batch, length)
    return Sized(f"{batch} x {length} tokens", model(config(**sizes)),
                 {"input_ids": ids, "labels": ids})


def _gpt2() -> Sized:
    return _text("gpt2", 8, 1024, loss_type="ForCausalLMLoss")


def _llama() -> Sized:
    """Llama 3.2 1B."""
    return _text("llama", 2, 4096, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                 num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
                 max_position_embeddings=8192, head_dim=64, tie_word_embeddings=True)


def _bert() -> Sized:
    return _text("bert", 16, 512)


def _t5() -> Sized:
    """T5 base."""
    return _text("t5", 8, 512, d_model=768, d_ff=3072, num_layers=12, num_heads=12,
                 decoder_start_token_id=0)


def _vit() -> Sized:
    """ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    return Sized("64 images of 224²", ViTForImageClassification(ViTConfig(num_labels=1000)),
                 {"pixel_values": torch.zeros(64, 3, 224, 224), "labels": _ids(64, 1)[:, 0]})


def _resnet50() -> Sized:
    return Sized("64 images of 224²", _resnet(64, (3, 4, 6, 3), 1000),
                 (torch.zeros(64, 3, 224, 224),),
                 lambda out: nn.functional.cross_entropy(out, _ids(64, 1)[:, 0].to(out.device)))


def _unet() -> Sized:
    return Sized("8 images of 256²", _UNet(64, 4, 3), (torch.zeros(8, 3, 256, 256),),
                 lambda out: nn.functional.cross_entropy(
                     out, _ids(8 * 256, 256).view(8, 256, 256).to(out.device)))


MODELS = {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "vit": _vit, "t5": _t5,
          "resnet": _resnet50, "unet": _unet}


def _moved(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if value.is_floating_point() else value


def predictions(gpus: list[str], names: list[str], share: float) -> None:
    """A table, and the kernels with their rules below it."""
    table = Table("model", "batch", "dtype", "GPU", "plain GB:.2f", f"under {share:.0%}, GB:.2f",
                  "extra time:.1%", "seconds:.0f", "captured kernels")
    rules: dict[str, dict[str, None]] = {}
    for name in names:
        for dtype in DTYPES:
            for gpu in gpus:
                with torch.device("meta"):
                    sized = MODELS[name]()
                model = sized.model.to(dtype)
                inputs = ({k: _moved(v, dtype) for k, v in sized.inputs.items()}
                          if isinstance(sized.inputs, Mapping)
                          else tuple(_moved(v, dtype) for v in sized.inputs))
                started = time.monotonic()
                what = {"loss_fn": sized.loss_fn, "optimizer": "adamw", "output": "dropped",
                        "device": "cuda", "gpu": gpu, "time_limit": 20.0}
                try:
                    plan = planner.plan(model, inputs, budget=f"{share:.0%}", **what)
                except InfeasibleBudget as error:
                    plan = planner.plan(model, inputs, budget=error.minimum_bytes, **what)
                kernels = {each.kernel: each.rule for each in plan.kernels}
                for kernel, rule in kernels.items():
                    rules.setdefault(f"{name}, {kernel}", {})[rule] = None
                table.row(name, sized.batch, str(dtype)[6:], gpu, plan.baseline_peak_bytes / 1e9,
                          plan.peak_bytes / 1e9, plan.overhead, time.monotonic() - started,
                          ", ".join(kernel.removeprefix("attention by ") for kernel in kernels))
    print()
    for what, found in rules.items():
        for rule in found:
            print(f"- {what}: {rule}")


def torchtitan() -> None:
    """One rank of Llama 3 8B under FSDP2 with torchtitan's settings: parameters in float32,
    gathered in bf16, two sequences of 8192 tokens; selective checkpointing by op, traced as it is.

    Published (torchtitan/benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, reserved by
    the allocator): 82.4 GiB on 8 GPUs, 67.0 GiB on 128.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    table = Table("ranks", "step", "allocated GiB:.1f", "extra time:.1%")
    for ranks in (8, 128):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(
                hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, use_cache=False,
                max_position_embeddings=8192))
            ids = _ids(2, 8192)
        inputs = {"input_ids": ids, "labels": ids}
        shards = planner.DataParallel("fsdp2", ranks=ranks, units=("model.layers.*",),
                                      param_dtype="bf16", reduce_dtype="fp32")
        what = {"optimizer": "adamw", "device": "cuda", "gpu": "H100", "parallel": shards}
        plain = planner.data_parallel(model, inputs, **what)
        table.row(ranks, "plain", plain.peak_bytes / 2 ** 30, None)
        checkpointed = with_checkpoints(model, selective=True)
        selective = planner.data_parallel(checkpointed, inputs, **what)
        table.row(ranks, "selective, as torchtitan", selective.peak_bytes / 2 ** 30, None)
        plan = planner.plan(model, inputs, budget=selective.peak_bytes, output="dropped",
                            time_limit=30.0, **what)
        table.row(ranks, "plan within that", plan.peak_bytes / 2 ** 30, plan.overhead)
    for each in plan.kernels:
        print(f"- {each.kernel} in {each.modules} ({each.count}): {each.rule}")


def main() -> None:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_without_device",
                                     description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default=",".join(GPUS))
    parser.add_argument("--model", default=",".join(MODELS))
    parser.add_argument("--budget", type=float, default=0.6, help="part of the plain peak")
    parser.add_argument("--torchtitan", action="store_true")
    arguments = parser.parse_args()
    if arguments.torchtitan:
        torchtitan()
    else:
        predictions(arguments.gpu.split(","), arguments.model.split(","), arguments.budget)


if __name__ == "__main__":
    main()
