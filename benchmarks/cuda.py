"""Plans on an NVIDIA GPU: peaks as predicted and as measured, and step times at equal peaks.

    python -m benchmarks.cuda [--minutes 8.5]
    python -m benchmarks.cuda --rehearse      # the same code, tiny, on the CPU

GPT-2 medium, and Llama at the width of 8B (on small GPUs of 1B) with as many layers as fit, in
bf16.  Each is predicted on `meta` as on a machine without the GPU, then measured: the bytes that
torch's allocator handed out and reserved.  Step times (forward, loss, backward; rounds in turns)
are those of the plain step, `torch.compile`, its `activation_memory_budget`, checkpointing of every
layer, selective checkpointing as in torchtitan (every second matrix product and attention are
kept), and of plans within the measured peak of each of these.  Alternatives that exceed the time
are left out, with a note.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import planner
from benchmarks.measure import time_in_turns
from benchmarks.table import Table
from planner._graph_capture.memory.allocator import record_peak
from planner.errors import PlannerError

aten = torch.ops.aten


class Subject(NamedTuple):
    """A model, and a function that makes it on a device."""

    name: str
    layers: int
    build: Callable[[int], nn.Module]
    batch: tuple[int, int]
    vocabulary: int


def _gpt2(layers: int, **sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False,
                                      loss_type="ForCausalLMLoss", **sizes))


def _llama(layers: int, **sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False,
                                        max_position_embeddings=8192, **sizes))


def subjects(memory_bytes: int | None) -> list[Subject]:
    """Return the models to measure on a GPU with so much memory; `None`: a rehearsal."""
    if memory_bytes is None:
        return [Subject("gpt2, tiny", 2, functools.partial(
            _gpt2, n_embd=64, n_head=4, vocab_size=512), (2, 64), 512)]
    large = memory_bytes > 60e9
    width = ({"hidden_size": 4096, "intermediate_size": 14336} if large
             else {"hidden_size": 2048, "intermediate_size": 8192})
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
    return [Subject("gpt2 medium", 24, functools.partial(_gpt2, n_embd=1024, n_head=16),
                    (8 if large else 2, 1024), 50257),
            Subject(f"llama, width of {'8B' if large else '1B'}", 16 if large else 12,
                    functools.partial(_llama, **width, **heads), (2, 4096), 32000)]


class LossOnly(nn.Module):
    """Returns only the loss, so that all alternatives free the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting the next token."""
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def on_meta(subject: Subject, layers: int) -> tuple[nn.Module, torch.Tensor]:
    """Return model and batch without memory."""
    with torch.device("meta"):
        model = LossOnly(subject.build(layers)).to(torch.bfloat16)
        return model, torch.zeros(subject.batch, dtype=torch.long)


def layers_that_fit(subject: Subject, device: str, memory_bytes: int | None) -> int:
    """Return the number of layers whose plain step is predicted to use at most 80% of the memory.
    """
    layers = subject.layers
    while memory_bytes is not None and layers > 1:
        model, ids = on_meta(subject, layers)
        if planner.memory(model, ids, device=device).peak_bytes <= 0.8 * memory_bytes:
            break
        layers -= 2
    return layers


def sharing_tensors(model: nn.Module) -> nn.Module:
    """Return another model of the same parameters and buffers."""
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(),
                                                             *model.buffers())})


def with_checkpoints(model: nn.Module, *, selective: bool) -> nn.Module:
    """Return a copy of a model of transformers, or of a module that contains one, in which every
    layer is checkpointed."""
    model = sharing_tensors(model)
    inner: Any = model.model if isinstance(model, LossOnly) else model
    how = {"use_reentrant": False, **({"context_fn": _contexts} if selective else {})}
    if hasattr(inner, "activation_checkpointing_enable"):  # transformers 5.23 and later
        inner.activation_checkpointing_enable(how)
    else:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    return model.train()


_KEPT = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention.default,
         aten._scaled_dot_product_efficient_attention.default,
         aten._scaled_dot_product_cudnn_attention.default,
         aten._scaled_dot_product_flash_attention_for_cpu.default}


def _contexts() -> Any:
    products = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op in (aten.mm.default, aten.addmm.default)
        products[context.is_recompute] += is_product
        saves = op in _KEPT and not (is_product and products[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def step(model: Callable[..., torch.Tensor], ids: torch.Tensor) -> None:
    """Run forward, loss and backward, starting without gradients."""
    for parameter in model.parameters():  # type: ignore[attr-defined]
        parameter.grad = None
    model(ids).backward()
    if ids.is_cuda:
        torch.cuda.synchronize()


def measured(model: Callable[..., torch.Tensor], ids: torch.Tensor) -> tuple[int, int]:
    """Return the peak of a step above the memory before it, after two others, and the reserved
    bytes at its end."""
    step(model, ids)
    step(model, ids)
    for parameter in model.parameters():  # type: ignore[attr-defined]
        parameter.grad = None
    if ids.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    peak = record_peak(lambda: step(model, ids), ids.device).peak_bytes
    return peak, torch.cuda.max_memory_reserved() if ids.is_cuda else 0


def alternatives(model: LossOnly, backends: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the alternatives without plans, by name."""
    yield "plain", model
    yield "checkpointing every layer", with_checkpoints(model, selective=False)
    yield "selective, as torchtitan", with_checkpoints(model, selective=True)
    if "inductor" in backends:
        yield "torch.compile", torch.compile(sharing_tensors(model))
        yield "activation_memory_budget 0.5", torch.compile(sharing_tensors(model))


def run(subject: Subject, device: str, memory_bytes: int | None, deadline: float, rounds: int
        ) -> None:
    """Measure one model and print its table."""
    backends = ("eager",) if memory_bytes is None else ("eager", "inductor")
    layers = layers_that_fit(subject, device, memory_bytes)
    ahead = planner.plan(*on_meta(subject, layers), device=device)
    torch.manual_seed(0)
    with torch.device(device):
        model = LossOnly(subject.build(layers)).to(torch.bfloat16)
        ids = torch.randint(0, subject.vocabulary, subject.batch)
    print(f"\n{subject.name}, {layers} layers, {subject.batch[0]} x {subject.batch[1]} tokens; "
          f"predicted on meta: {ahead.baseline_peak_bytes / 1e9:.3f} GB plain, kernels "
          f"{', '.join(each.kernel for each in ahead.kernels) or 'of the CPU'}\n")
    resident = ahead.resident_bytes
    table = Table("step", "predicted GB:.3f", "allocated GB:.3f", "reserved GB:.3f",
                  "times plain:.3f", "estimated:.3f")
    steps: dict[str, tuple[Any, int, int, float | None, float | None]] = {}
    limits: list[tuple[str, str, int]] = []
    for name, other in alternatives(model, backends):
        if time.monotonic() > deadline:
            print(f"left out for time: {name}")
            continue
        functorch_config.activation_memory_budget = 0.5 if "budget" in name else 1.0
        peak, reserved = measured(other, ids)
        functorch_config.activation_memory_budget = 1.0
        predicted = ahead.baseline_peak_bytes if name == "plain" else None
        steps[name] = (other, peak + resident, reserved, predicted, None)
        backend = "inductor" if name in ("torch.compile", "activation_memory_budget 0.5") else (
            "eager")
        if name not in ("plain", "torch.compile"):
            limits.append((name, backend, peak + resident))
    for name, backend, limit in limits:
        if time.monotonic() > deadline:
            print(f"left out for time: a plan at the peak of {name}")
            continue
        try:
            plan = planner.plan(model, ids, budget=limit, backend=backend, time_limit=20.0)
        except PlannerError as error:
            print(f"no plan at the peak of {name}: {str(error).splitlines()[0]}")
            continue
        planned = plan.apply(model)
        peak, reserved = measured(planned, ids)
        steps[f"plan, {backend}, at the peak of {name}"] = (
            planned, peak + resident, reserved, plan.peak_bytes, 1 + plan.overhead)
    times = time_in_turns([functools.partial(step, each[0], ids) for each in steps.values()],
                          rounds, warm_up=1)
    for number, (name, (_, peak, reserved, predicted, estimate)) in enumerate(steps.items()):
        table.row(name, None if predicted is None else predicted / 1e9, peak / 1e9, reserved / 1e9,
                  times.ratio(number, 0).median, estimate)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda",
                                     description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU")
    arguments = parser.parse_args()
    if arguments.rehearse:
        device, memory_bytes = "cpu", None
    elif torch.cuda.is_available():
        device, memory_bytes = "cuda", torch.cuda.get_device_properties(0).total_memory
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    else:
        print("there is no GPU here, so nothing is measured; --rehearse runs the code on the CPU")
        return
    started, found = time.monotonic(), subjects(memory_bytes)
    for number, subject in enumerate(found, start=1):
        deadline = started + 60 * arguments.minutes * 0.8 * number / len(found)
        run(subject, device, memory_bytes, deadline, arguments.rounds)


if __name__ == "__main__":
    main()
